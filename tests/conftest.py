"""Test settings: quiet TensorFlow, helpers on the path, seeds reset before every test."""

import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "optimizers"), str(HERE.parent / "benchmarks")]


@pytest.fixture(autouse=True)
def _fixed_seed():
    keras.utils.set_random_seed(11)
