"""Test settings: quiet TensorFlow, seeds reset before every test."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest


@pytest.fixture(autouse=True)
def _fixed_seed():
    keras.utils.set_random_seed(11)
