"""Tries by experiment, in random graphs, what the Follower calls rows."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.proof.experiments import follow, influence, specs, usual
from tf_adadp.gradients.dilation import rows_together
from tf_adadp.gradients.proof import Mixed, Rows
from verification.fuzzing.graphs import SHAPES, grow

BATCHES = (1, 2, 3, 5)


def _draw(seed, wanted=None):
    """The graph of a seed, with all its outputs or some; what the Follower says of all."""
    drawn = []

    def function(key, *inputs):
        with rows_together():
            drawn[:] = [grow(np.random.default_rng(seed), key, *inputs)]
        pool = drawn[0].pool
        return pool if wanted is None else [pool[i] for i in wanted]

    return follow(function, *specs(*SHAPES)), drawn[0].is_random


def _runs(followed):
    """Tells whether it runs, for each size of a batch: shapes may not fit."""
    sample = usual(*SHAPES)
    found = []
    for count in BATCHES:
        try:
            followed.run(*sample(np.random.default_rng(0), count, False))
        except tf.errors.OpError:
            found.append(False)
        else:
            found.append(True)
    return found


def check(seed):
    """Checks the graph of a seed; counts what was found."""
    whole, is_random = _draw(seed)
    kinds = collections.Counter(type(v).__name__ for v in whole.values[len(SHAPES) :])
    wanted = [i for i, v in enumerate(whole.values) if isinstance(v, Rows)]
    followed, _ = _draw(seed, wanted)
    if not all(_runs(followed)):
        sound = []
        for i in wanted:
            runs = _runs(_draw(seed, [i])[0])
            assert all(runs) or not any(runs), f"output {i} runs for some sizes of a batch only"
            sound += [i] * all(runs)
        followed, _ = _draw(seed, sound)
    # A step of a function may fall on a rounding error; what mixes is found with every seed.
    for other in range(2):
        found = influence(followed, usual(*SHAPES), seed=other, moves=not is_random)
        if found is None:
            return kinds
    raise AssertionError(found)


@pytest.mark.representative(2)
@pytest.mark.parametrize("seed", range(20))
def test_rows_are_rows(seed):
    check(seed)


@pytest.mark.representative(0, 4)
@pytest.mark.parametrize("start", range(1000, 1600, 20))
def test_rows_are_rows_in_many_graphs(start):
    kinds = collections.Counter()
    for seed in range(start, start + 20):
        kinds += check(seed)
    # Neither all of them nor none of them is the answer.
    assert kinds[Rows.__name__] > 10
    assert kinds[Mixed.__name__] > 10
