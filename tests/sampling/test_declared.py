import numpy as np
import pytest
import tensorflow as tf

from tf_adadp.accounting import FixedSizeSampling, PoissonSampling, UnknownSampling
from tf_adadp.sampling import DeclaredLots

LAW = PoissonSampling(num_examples=10, expected_size=4)


def numbers(*sizes):
    """A dataset of batches of these sizes, numbering the examples."""
    ends = np.cumsum([0, *sizes])

    def batches():
        for start, end in zip(ends, ends[1:], strict=False):
            rows = np.arange(start, end)
            yield rows, rows * 0.5

    return tf.data.Dataset.from_generator(
        batches,
        output_signature=(tf.TensorSpec((None,), tf.int64), tf.TensorSpec((None,), tf.float64)),
    )


def ids(elements):
    return [x.numpy()[mask.numpy() == 1].tolist() for (x, _, _), mask in elements]


def test_every_batch_is_a_lot_in_physical_batches():
    for read in (lambda lots: lots.take(3, 4), lambda lots: lots.as_dataset(4, 3)):
        elements = list(read(DeclaredLots(numbers(5, 0, 8), LAW)))
        assert [mask.shape for _, mask in elements] == [(2, 4), (0, 4), (2, 4)]
        assert ids(elements) == [[0, 1, 2, 3, 4], [], [5, 6, 7, 8, 9, 10, 11, 12]]
        for (x, y, weight), mask in elements:
            assert weight is None
            assert y.dtype == mask.dtype == tf.float32
            np.testing.assert_array_equal(y, x.numpy() * 0.5)
            assert not x.numpy()[mask.numpy() == 0].any()


def test_the_law_is_marked_as_declared_and_gives_the_sizes():
    lots = DeclaredLots(numbers(3), LAW)
    assert lots.law == PoissonSampling(num_examples=10, expected_size=4, declared=True)
    assert not LAW.declared
    assert (lots.num_examples, lots.expected_size, lots.steps_per_epoch) == (10, 4.0, 3)
    assert lots.seed is None
    assert DeclaredLots(numbers(3), LAW, steps_per_epoch=7).steps_per_epoch == 7


def test_a_dataset_that_resamples_is_one_stream_and_is_repeated():
    lots = DeclaredLots(numbers(1, 2), LAW, resamples=True)
    one, two = [0], [1, 2]
    assert ids(lots.take(3, 4)) == [one, two, one]
    assert ids(lots.as_dataset(4, num_lots=2)) == [two, one]
    assert ids(lots.take(1, 4)) == [two]
    assert lots.step == 6
    with pytest.raises(ValueError, match="step cannot go back from 6 to 2"):
        lots.step = 2


def test_structures_weights_and_inner_dimensions_that_vary():
    def batches():
        for length in (2, 5):
            x = {"tokens": np.ones((3, length), np.int32), "name": np.array(["a", "b", "c"])}
            yield x, (np.ones(3), np.ones((3, 2), bool)), np.arange(3)

    dataset = tf.data.Dataset.from_generator(
        batches,
        output_signature=(
            {
                "tokens": tf.TensorSpec((None, None), tf.int32),
                "name": tf.TensorSpec((None,), tf.string),
            },
            (tf.TensorSpec((None,), tf.float64), tf.TensorSpec((None, 2), tf.bool)),
            tf.TensorSpec((None,), tf.int64),
        ),
    )
    for length, ((x, y, weight), _) in zip(
        (2, 5), DeclaredLots(dataset, LAW).as_dataset(2, 2), strict=True
    ):
        assert x["tokens"].shape == (2, 2, length)
        assert x["name"].numpy().tolist() == [[b"a", b"b"], [b"c", b""]]
        assert (y[0].dtype, y[1].dtype) == (tf.float32, tf.bool)
        assert weight.dtype == tf.float32
        assert weight.numpy().tolist() == [[0, 1], [2, 0]]


def test_a_component_that_is_none_stays_none():
    dataset = numbers(2).map(lambda x, y: (x, None, y))
    lots = DeclaredLots(dataset, LAW)
    assert lots.element_spec[1] is None
    (((_, y, weight), _),) = lots.as_dataset(2, 1)
    assert y is None
    assert weight.numpy().tolist() == [[0, 0.5]]


def test_a_fixed_size_law_is_checked_against_every_batch():
    law = FixedSizeSampling(num_examples=10, size=4)
    lots = DeclaredLots(numbers(4, 4, 2), law)
    assert lots.expected_size == 4.0
    assert ids(lots.take(2, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="batch of dataset has 2 rows, but its law says 4"):
        next(lots.take(1, 4))


def test_rows_that_do_not_agree_are_refused():
    dataset = numbers(3).map(lambda x, y: (x, y[1:]))
    with pytest.raises(ValueError, match=r"differ in rows: \[2, 3\]"):
        next(DeclaredLots(dataset, LAW).take(1, 4))


@pytest.mark.parametrize("law", [None, "poisson", 0.1, PoissonSampling, UnknownSampling("?")])
def test_the_law_must_be_stated(law):
    with pytest.raises(TypeError, match="law must be a PoissonSampling or a FixedSizeSampling"):
        DeclaredLots(numbers(3), law)


@pytest.mark.parametrize("dataset", [None, np.ones((3, 2)), [(1, 2)]])
def test_only_datasets_can_be_declared(dataset):
    with pytest.raises(TypeError, match="dataset must be a tf.data.Dataset, got a .*PoissonLots"):
        DeclaredLots(dataset, LAW)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: x, r"dataset must give \(x, y\) or \(x, y, sample_weight\)"),
        (lambda x, y: {"x": x, "y": y}, r"dataset must give \(x, y\)"),
        (lambda x, y: (x, y, y, y), r"dataset must give \(x, y\)"),
        (lambda x, y: (x, {"k": tf.reduce_sum(y)}), r"y\['k'\] in dataset is .*no dense tensor"),
        (lambda x, y: (tf.sparse.from_dense(x), y), "x in dataset is SparseTensorSpec"),
    ],
)
def test_elements_of_another_form_are_refused(change, message):
    with pytest.raises(TypeError, match=message):
        DeclaredLots(numbers(3).map(change), LAW)


def test_an_empty_dataset_is_refused():
    known = tf.data.Dataset.from_tensor_slices((np.ones((0, 2)), np.ones((0, 2))))
    with pytest.raises(ValueError, match="dataset is empty"):
        DeclaredLots(known, LAW)
    with pytest.raises(ValueError, match="dataset is empty"):
        next(DeclaredLots(numbers(), LAW).take(1, 4))


@pytest.mark.parametrize(("steps", "error"), [(0, ValueError), (2.5, TypeError)])
def test_bad_steps_per_epoch_are_refused(steps, error):
    with pytest.raises(error, match=f"steps_per_epoch must be .*, got {steps}"):
        DeclaredLots(numbers(3), LAW, steps_per_epoch=steps)
