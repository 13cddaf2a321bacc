"""The fuzzer in short: cases by hand, and that it finds the package broken where it is."""

import re

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_adadp import clipping
from tf_adadp.charging.charges import Charges
from tf_adadp.optimizers.base import DPOptimizer
from tf_adadp.training import session
from verification import fuzz
from verification.fuzzing import check
from verification.fuzzing.cases import draw_case
from verification.fuzzing.operations import Operations, RandomFunction

SIMPLEST = {
    "seed": 0,
    "model": {
        "style": "functional",
        "branches": [
            {"input": "vector", "layers": [], "end": "flatten", "unknown_length": False}
        ],
        "trunk": [],
        "heads": [
            {"task": "sparse", "from_logits": True, "loss": "object", "label_dtype": "int32"}
        ],
        "inputs": "single",
        "outputs": "single",
        "wide": False,
        "refused": None,
    },
    "policy": "float32",
    "rows": 40,
    "lots": "arrays",
    "fraction": 0.5,
    "x_dtype": "float32",
    "poison": None,
    "weights": None,
    "optimizer": "DPSGD",
    "arguments": {},
    "noise_multiplier": 1.0,
    "learning_rate": None,
    "engine": "auto",
    "physical_batch_size": None,
    "jit_compile": False,
    "eager": False,
    "steps_per_execution": 1,
    "metrics": None,
    "trouble": None,
}  # fmt: skip


OTHERS = {
    "half": {"policy": "bfloat16", "lots": "truncated", "optimizer": "ADADP", "poison": "nan"},
    "scaled": {"policy": "mixed_float16", "weights": "huge", "engine": "vectorized", "rows": 2},
    "mistaken": {"trouble": "labels_nan"},
}


def test_trainings_are_sound_or_refused_and_a_lost_process_is_a_failure():
    wanted = [(name, {**SIMPLEST, **changes}) for name, changes in OTHERS.items()]
    rows = {row["index"]: row for row in fuzz.run([*wanted, ("lost", {}), ("plain", SIMPLEST)], 3)}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "half": "trained",
        "scaled": "trained",
        "mistaken": "refused",
        "lost": "failed",
        "plain": "trained",
    }
    assert "process ended with status 1" in rows["lost"]["message"]
    assert rows["lost"]["case"] == {}
    assert 0.99 < rows["plain"]["moved"] <= 1 + 1e-5
    trained = [row for row in rows.values() if row["outcome"] == "trained"]
    counted = fuzz.summary(trained, {**dict(wanted), "plain": SIMPLEST})
    assert counted["steps"] == 3 * 3


def test_a_case_is_the_same_whenever_it_is_drawn():
    assert draw_case(0, 5) == draw_case(0, 5)
    drawn = [draw_case(0, 5), draw_case(0, 6), draw_case(1, 5)]
    assert len({fuzz.digest(case) for case in drawn}) == 3


def _with_operations(number, **changes):
    model = {**SIMPLEST["model"], "trunk": [["operations", number], ["dense", 3]]}
    return {**SIMPLEST, "model": model, **changes}


def test_some_cases_have_operations_between_their_layers():
    drawn = [str(draw_case(0, index)["model"]) for index in range(40)]
    assert 1 <= sum("operations" in model for model in drawn) <= 12


@pytest.mark.representative(0, 4)
@pytest.mark.parametrize("engine", ["ghost", "vectorized"])
@pytest.mark.parametrize("number", range(6))
def test_operations_between_layers_are_trained_soundly(number, engine):
    result = check.run(_with_operations(number, engine=engine), 2)
    assert result["outcome"] in ("trained", "refused"), result
    assert result["outcome"] == "trained" or engine == "ghost", result


@pytest.mark.parametrize("number", range(4))
def test_drawn_operations_are_the_same_at_every_call(number):
    x = tf.random.stateless_normal([3, 4, 3], [1, 2])
    weight, key = tf.random.stateless_normal([4, 3], [3, 4]), tf.constant([5, 6])
    function = RandomFunction(number, (4, 3), (4, 3))
    again = RandomFunction(number, (4, 3), (4, 3))
    run = tf.function(function, autograph=False).get_concrete_function(
        tf.TensorSpec([None, 4, 3]), weight, key
    )
    found = run(x, weight, key)
    assert found.shape == (3, function.size)
    np.testing.assert_array_equal(found[:1].shape, again(x[:1], weight, key).shape)
    np.testing.assert_allclose(run(x[:1], weight, key), again(x[:1], weight, key), 1e-4, 1e-6)


def test_operations_keep_the_shape_of_a_batch():
    x = keras.Input((None, 3))
    model = keras.Model(x, Operations(1, 5)(x))
    assert model.output_shape == (None, None, 3)
    assert model(tf.ones([2, 5, 3])).shape == (2, 5, 3)


def _noise_for_half(monkeypatch):
    whole = clipping.L2Ball.noise_stddev
    monkeypatch.setattr(
        clipping.L2Ball, "noise_stddev", lambda self, sigma, n: whole(self, sigma / 2, n)
    )


def _charges_every_other_step(monkeypatch):
    charge, calls = Charges._write, []

    def write(self, *args, **kwargs):
        calls.append(1)
        if len(calls) % 2:
            charge(self, *args, **kwargs)

    monkeypatch.setattr(Charges, "_write", write)


def _breaks_after_a_step(monkeypatch):
    def can_continue(self, law):
        raise ValueError("a clear error, and too late")

    monkeypatch.setattr(DPOptimizer, "can_continue", can_continue)


def _says_nothing_useful(monkeypatch):
    def prepare(self, spec):
        raise KeyError("x")

    monkeypatch.setattr(session.Session, "prepare", prepare)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (_noise_for_half, "moved the sum by [12]"),
        (_charges_every_other_step, "2 steps, 1 charged"),
        (_breaks_after_a_step, "error after 1 steps"),
        (_says_nothing_useful, "unclear error at fit: KeyError"),
    ],
)
def test_a_broken_package_fails(fault, found, monkeypatch):
    fault(monkeypatch)
    result = check.run(SIMPLEST, 2)
    assert result["outcome"] == "failed", result
    assert re.search(found, result["message"]), result


def test_events_differ_by_more_than_rounding():
    def sampled(probability, sigma):
        return dp_accounting.PoissonSampledDpEvent(
            probability, dp_accounting.GaussianDpEvent(sigma)
        )

    assert check._alike(sampled(0.5, 1.2), sampled(0.5, 1.2 * (1 + 1e-15)))
    assert not check._alike(sampled(0.5, 1.2), sampled(0.5, 1.2 * (1 + 1e-9)))
    assert not check._alike(sampled(0.5, 1.2), sampled(0.4, 1.2))
    assert not check._alike(sampled(0.5, 1.2), dp_accounting.GaussianDpEvent(1.2))
    assert check._alike(dp_accounting.NonPrivateDpEvent(), dp_accounting.NonPrivateDpEvent())
    truncated = dp_accounting.TruncatedSubsampledGaussianDpEvent
    assert not check._alike(truncated(40, 0.5, 20, 1.0), truncated(40, 0.5, 21, 1.0))
