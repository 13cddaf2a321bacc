"""Test settings: quiet TensorFlow, and the same keys and weights in every run of a test."""

import collections
import gc
import math
import os
import pathlib
import random
import secrets

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis
import keras
import pytest

HERE = pathlib.Path(__file__).parent
# Rooms of tests that start processes or train for long: the second run has them.
EXTENDED_ROOMS = {"benchmarks", "distribution", "examples", "verification"}

hypothesis.settings.register_profile("quick", max_examples=10, deadline=None, derandomize=True)
hypothesis.settings.register_profile("full", max_examples=60, deadline=None, derandomize=True)
hypothesis.settings.load_profile("quick")

# Stands in for the operating system's entropy, which the keys of noise and sampling are drawn from:
# a statistical test then passes or fails in every run alike. Processes that a test starts have
# secret keys. A fork of this one must not draw what its parent draws.
ENTROPY = random.Random()
secrets.token_bytes, secrets.randbits = ENTROPY.randbytes, ENTROPY.getrandbits
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=ENTROPY.seed)


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items):
    seen = collections.Counter()
    for item in items:
        test = item.path, getattr(item, "originalname", item.name)
        seen[test] += 1
        few = item.get_closest_marker("representative")
        first, second = (*few.args, math.inf)[:2] if few else (math.inf, math.inf)
        if seen[test] > second:
            item.add_marker("nightly")
        if seen[test] > first or item.path.relative_to(HERE).parts[0] in EXTENDED_ROOMS:
            item.add_marker("extended")


def pytest_collection_finish():
    """Takes the modules' objects out of garbage collection: a fifth of the time of trainings."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    """Seeds a fixture, and with the last one of a test the test itself, by its name."""
    ENTROPY.seed(f"{request.node.nodeid} {fixturedef.argname}")
    if fixturedef.scope != "function":  # else `_fixed_seed` has done it
        keras.utils.set_random_seed(11)


@pytest.fixture(autouse=True)
def _fixed_seed():
    keras.utils.set_random_seed(11)
