import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import private_model
from tf_adadp import accounting
from tf_adadp.accounting import FixedSizeSampling, PoissonSampling, UnknownSampling
from tf_adadp.sampling import DeclaredLots
from tf_adadp.sampling.lot_sizes import ContradictedLaw, SizeCheck

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
    with pytest.raises(TypeError, match="law=.*: give a PoissonSampling or a FixedSizeSampling"):
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
        (lambda x, y: (x, {"k": tf.reduce_sum(y)}), r"y\['k'\] in dataset is .*not a dense tensor"),
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
    with pytest.raises(error, match=f"steps_per_epoch={steps}: give an integer ≥ 1"):
        DeclaredLots(numbers(3), LAW, steps_per_epoch=steps)


# Datasets that end.


def poisson_lots(count, law, seed=0):
    """A dataset of so many lots, each drawn by a Poisson law, once."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(law.num_examples, 6)).astype(np.float32)
    drawn = [rng.random(law.num_examples) < law.probability for _ in range(count)]

    def batches():
        for rows in drawn:
            yield x[rows], np.zeros(rows.sum(), np.int32)

    signature = (tf.TensorSpec((None, 6), tf.float32), tf.TensorSpec((None,), tf.int32))
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


@pytest.mark.representative(1)
@pytest.mark.parametrize("steps_per_execution", [1, 3, 8])
def test_fit_stops_before_lots_are_replayed(steps_per_execution):
    """20 lots used for 10 epochs read ε = 1.04; ten releases from each cost 15.4."""
    assert accounting.epsilon(1.0, 0.01, 200, 1e-4) == pytest.approx(1.035, abs=1e-3)
    assert accounting.epsilon(10**-0.5, 0.01, 20, 1e-4) == pytest.approx(15.428, abs=1e-3)
    law = PoissonSampling(1000, 10)
    lots = DeclaredLots(poisson_lots(20, law), law, steps_per_epoch=20)
    private = private_model(steps_per_execution=steps_per_execution)
    with pytest.raises(ValueError, match="came to its end after 20 batches.*resamples=True"):
        private.fit(lots, epochs=10, verbose=0)
    whole = 20 - 20 % steps_per_execution
    assert private.ledger.steps == private.optimizer.releases == whole
    # The stream stays at its end.
    with pytest.raises(ValueError, match="came to its end after 20 batches"):
        private.fit(lots, epochs=1, steps_per_epoch=20, verbose=0)


def test_fit_uses_every_lot_there_is():
    law = PoissonSampling(1000, 10)
    lots = DeclaredLots(poisson_lots(20, law), law, steps_per_epoch=10)
    private = private_model()
    private.fit(lots, epochs=1, verbose=0)
    assert private.ledger.steps == 10
    with pytest.raises(ValueError, match="came to its end"):  # what is drawn ahead is not trained
        private.fit(lots, epochs=2, verbose=0)
    assert 18 <= private.ledger.steps <= 20


def test_fit_goes_on_where_the_dataset_resamples():
    law = PoissonSampling(1000, 10)
    lots = DeclaredLots(poisson_lots(5, law), law, steps_per_epoch=12, resamples=True)
    private = private_model()
    private.fit(lots, epochs=2, verbose=0)
    assert private.ledger.steps == 24


def test_a_dataset_serves_one_declaredlots():
    """New lots of the same dataset in every fit: ε read 11.0 where 20.3 is possible."""
    dataset = numbers(3, 1)
    next(DeclaredLots(dataset, LAW).take(1, 4))
    with pytest.raises(ValueError, match="dataset was read before, by other DeclaredLots"):
        next(DeclaredLots(dataset, LAW).take(1, 4))
    next(DeclaredLots(dataset, LAW, resamples=True).take(1, 4))


@pytest.mark.parametrize(
    "pipeline", [lambda d: d.repeat(), lambda d: d.cache().repeat(9).prefetch(1)]
)
def test_repeated_datasets_have_to_say_that_they_resample(pipeline):
    with pytest.raises(ValueError, match="dataset ends in repeat.*resamples=True"):
        DeclaredLots(pipeline(numbers(3, 1)), LAW)
    DeclaredLots(pipeline(numbers(3, 1)), LAW, resamples=True)
    # What comes before a step that samples is another matter.
    DeclaredLots(numbers(3, 1).repeat().map(lambda x, y: (x, y)), LAW)


def test_a_generator_that_fails_says_so():
    def batches():
        yield np.zeros((3, 2)), np.zeros(3)
        raise OSError("the disk is gone")

    signature = (tf.TensorSpec((None, 2)), tf.TensorSpec((None,)))
    lots = DeclaredLots(tf.data.Dataset.from_generator(batches, output_signature=signature), LAW)
    next(lots.take(1, 4))
    for _ in range(2):
        with pytest.raises((OSError, tf.errors.OpError), match="the disk is gone"):
            next(lots.take(1, 4))


def test_iterations_end_with_an_error():
    lots = DeclaredLots(numbers(3, 1), LAW)
    assert len(list(lots.take(2, 4))) == 2
    with pytest.raises(ValueError, match="came to its end after 2 batches"):
        next(lots.take(1, 4))
    lots = DeclaredLots(numbers(3, 1), LAW)
    with pytest.raises(tf.errors.InvalidArgumentError, match="came to its end after 2 batches"):
        list(lots.as_dataset(4, num_lots=3))


@pytest.mark.parametrize("resamples", [1, None, "yes"])
def test_resamples_is_a_bool(resamples):
    with pytest.raises(TypeError, match="resamples=.*: give True or False"):
        DeclaredLots(numbers(3), LAW, resamples=resamples)


# Batches that contradict their law.


def records(count=3000):
    return tf.data.Dataset.from_tensor_slices((np.zeros((count, 6), np.float32), np.zeros(count)))


PIPELINES = [
    lambda d: d.batch(30),
    lambda d: d.batch(30, drop_remainder=True),
    lambda d: d.shuffle(100).batch(30).prefetch(2),
    lambda d: d.batch(30).shuffle(10).cache().take(50).skip(1).repeat(),
    lambda d: d.padded_batch(30),
    lambda d: d.batch(30, num_parallel_calls=2),
    lambda d: d.batch(30, drop_remainder=True).map(lambda x, y: (x + 1, y)),
    lambda d: d.batch(30).with_options(tf.data.Options()),
]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_batches_of_one_size_are_not_poisson(pipeline):
    law = PoissonSampling(3000, 30)
    with pytest.raises(ValueError, match="cut into batches of 30.*PoissonLots") as error:
        DeclaredLots(pipeline(records()), law)
    assert "DeclaredLots" not in str(error.value)


def test_batches_of_the_declared_size_are_legal():
    DeclaredLots(records().batch(30), FixedSizeSampling(3000, 30))
    DeclaredLots(records().batch(3000).repeat(), PoissonSampling(3000, 3000))
    DeclaredLots(records().batch(30).repeat(), FixedSizeSampling(3000, 30), resamples=True)
    DeclaredLots(records().batch(3000), PoissonSampling(3000, 2999))  # one lot has some size
    with pytest.raises(ValueError, match="cut into batches of 30.*have another size"):
        DeclaredLots(records().batch(30), FixedSizeSampling(3000, 60))


def test_batches_that_hide_behind_a_map_are_found_by_their_sizes():
    law = PoissonSampling(3000, 30)
    hidden = records().batch(30).map(lambda x, y: (tf.boolean_mask(x, y == 0), y))
    lots = DeclaredLots(hidden, law)
    private = private_model()
    with pytest.raises(ContradictedLaw, match="batches of dataset have 30 rows each"):
        private.fit(lots, epochs=1, verbose=0)
    assert private.ledger.steps < 15
    with pytest.raises(ValueError, match="the declared sampling law does not hold"):
        private.epsilon(1e-4)


def test_a_fixed_size_that_varies_is_found_before_it_is_charged():
    lots = DeclaredLots(
        poisson_lots(9, PoissonSampling(1000, 10)), FixedSizeSampling(1000, 10), steps_per_epoch=9
    )
    private = private_model(steps_per_execution=3)
    with pytest.raises(ContradictedLaw, match="but its law says 10 in every lot"):
        private.fit(lots, epochs=1, verbose=0)
    with pytest.raises(ValueError, match="the declared sampling law does not hold"):
        private.epsilon(1e-4)


def test_true_laws_are_not_refused():
    """20 streams of 2,000 lots of few distinct sizes; a false alarm has probability 2e-8."""
    rng = np.random.default_rng(1)
    for n, p in ((3, 0.3), (1000, 1e-3), (50, 0.98), (10, 0.5)):
        for _ in range(5):
            check = SizeCheck(PoissonSampling(n, n * p))
            for size in rng.binomial(n, p, 2000):
                check.see(size)


@pytest.mark.parametrize(("n", "size", "lots"), [(3000, 30, 11), (60_000, 600, 8), (100, 90, 11)])
def test_how_many_equal_lots_are_too_many(n, size, lots):
    check = SizeCheck(PoissonSampling(n, size))
    for _ in range(lots - 1):
        check.see(size)
    for _ in range(4):
        try:
            check.see(size)
        except ContradictedLaw:
            return
    pytest.fail("equal lots were not refused")


def test_a_lot_of_more_records_than_there_are():
    with pytest.raises(ContradictedLaw, match="its law says that there are 10 records"):
        next(DeclaredLots(numbers(11), LAW).take(1, 4))
