"""Test settings: quiet TensorFlow, seeds reset before every test."""

import collections
import gc
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis
import keras
import pytest

HERE = pathlib.Path(__file__).parent
# Rooms of tests that start processes or train for long: the second run has them.
EXTENDED_ROOMS = {"benchmarks", "distribution", "examples", "verification"}

hypothesis.settings.register_profile("quick", max_examples=10, deadline=None)
hypothesis.settings.register_profile("full", max_examples=60, deadline=None)
hypothesis.settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items):
    seen = collections.Counter()
    for item in items:
        test = item.path, getattr(item, "originalname", item.name)
        seen[test] += 1
        few = item.get_closest_marker("representative")
        left_over = few is not None and seen[test] > few.args[0]
        if left_over or item.path.relative_to(HERE).parts[0] in EXTENDED_ROOMS:
            item.add_marker("extended")


def pytest_collection_finish():
    """Takes the modules' objects out of garbage collection, which a fifth of the time went to."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed():
    keras.utils.set_random_seed(11)
