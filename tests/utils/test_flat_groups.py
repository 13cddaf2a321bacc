"""Converts lists of tensors into a few vectors, and back."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_adadp.utils import flat_groups
from tf_adadp.utils.flat_groups import FlatGroups

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=8)


@settings(derandomize=True)
@given(SHAPES, st.integers(0, 30))
def test_what_is_packed_comes_back(shapes, largest):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_groups, "LARGEST_GROUP", largest)
        groups = FlatGroups(shapes)
    vectors = groups.pack([tf.constant(a) for a in arrays])
    assert [i for members in groups.ranges for i in members] == list(range(len(shapes)))
    assert [v.shape.num_elements() for v in vectors] == groups.lengths()
    assert all(
        n <= largest or len(members) == 1
        for n, members in zip(groups.lengths(), groups.ranges, strict=True)
    )
    for found, array in zip(groups.unpack(vectors), arrays, strict=True):
        assert tuple(found.shape) == array.shape
        np.testing.assert_array_equal(found, array)
    means = [a.mean() if a.size else 0.0 for a in arrays]
    np.testing.assert_allclose(groups.means(vectors), means, rtol=1e-5, atol=1e-6)
    numbers = np.arange(1.0, len(shapes) + 1)
    spread = [
        tf.broadcast_to(s, v.shape) for s, v in zip(groups.spread(numbers), vectors, strict=True)
    ]
    for found, number, shape in zip(groups.unpack(spread), numbers, shapes, strict=True):
        np.testing.assert_array_equal(found, np.full(shape, number))


def test_few_vectors_of_many_small_tensors():
    shapes = [(10, 10), (10,)] * 100
    assert len(FlatGroups(shapes).ranges) == 1
    assert FlatGroups([(512, 512), (512,), (512, 513), (1,)]).ranges == [
        range(0, 1), range(1, 2), range(2, 3), range(3, 4)
    ]  # fmt: skip
