import numpy as np
import pytest

from tf_adadp.sampling import make_lot


@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_make_lot_keeps_all_rows_in_order(size):
    x, y = np.arange(14.0).reshape(7, 2), np.arange(7)
    (lot_x, lot_y, weight), mask = make_lot(x, {"a": y}, physical_batch_size=size)
    batches = -(-7 // size)
    assert lot_x.shape == (batches, size, 2)
    assert lot_y["a"].shape == mask.shape == (batches, size)
    assert weight is None
    assert mask.dtype == lot_x.dtype == "float32"
    np.testing.assert_array_equal(mask.numpy().ravel(), np.arange(batches * size) < 7)
    np.testing.assert_array_equal(lot_x.numpy().reshape(-1, 2)[:7], x)
    np.testing.assert_array_equal(lot_y["a"].numpy().ravel()[:7], y)
    assert not lot_x.numpy().reshape(-1, 2)[7:].any()


def test_make_lot_defaults_to_one_physical_batch():
    (x, y, _), mask = make_lot(np.ones((5, 2)))
    assert x.shape == (1, 5, 2)
    assert y is None
    assert mask.numpy().tolist() == [[1.0] * 5]


def test_make_lot_of_nothing_is_an_empty_lot():
    (x, y, _), mask = make_lot(np.ones((0, 2)), np.ones(0, int), physical_batch_size=4)
    assert (x.shape, y.shape, mask.shape) == ((0, 4, 2), (0, 4), (0, 4))


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_make_lot_refuses_a_bad_physical_batch_size(size, error):
    with pytest.raises(error, match=f"physical_batch_size={size}: give an integer ≥ 1"):
        make_lot(np.ones(3), physical_batch_size=size)
