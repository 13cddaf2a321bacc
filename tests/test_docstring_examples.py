"""Every public class and function shows an example, and it runs as it is written."""

import doctest
import importlib
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tf_adadp import accounting

# Names that an example may use without importing them.
NAMES = {"accounting": accounting, "dp": dp, "keras": keras, "np": np, "tf": tf}
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def public_objects():
    """Yields each public class and function once, under the shortest of its names."""
    seen = set()
    modules = ("tf_adadp", *(f"tf_adadp.{m}" for m in ("accounting", "audit", "tuning", "priors")))
    for module in modules:
        where = dp.priors if module == "tf_adadp.priors" else importlib.import_module(module)
        for name in sorted(where.__all__):
            value = getattr(where, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and id(value) not in seen:
                seen.add(id(value))
                yield f"{module}.{name}", value


def examples(name, value):
    """Returns the doctests of an object's docstring and of its public methods'."""
    found = doctest.DocTestFinder(recurse=True).find(value, name, globs=dict(NAMES))
    return [test for test in found if test.examples]


OBJECTS = dict(public_objects())
# Bounds that take many privacy loss distributions, some seconds each, and a search that trains.
SLOW = {"law_epsilon_lower_bound", "LawBound", "one_run_fdp_epsilon_lower_bound", "search"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.extended] * (name.rsplit(".", 1)[1] in SLOW))
        for name in OBJECTS
    ],
)
def test_example_runs_as_it_is_written(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write files
    keras.utils.set_random_seed(0)
    found = examples(name, OBJECTS[name])
    assert found, "it shows no example"
    for test in found:
        failures = []
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=failures.append)
        assert failures == [], "".join(failures)
