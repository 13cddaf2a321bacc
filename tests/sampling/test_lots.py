"""Tests the common parts of all lots: form, padding, counting steps, resuming, secrets."""

import copy
import pickle
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_adadp import sampling
from tf_adadp.accounting import PoissonSampling, UnknownSampling
from tf_adadp.sampling import (
    FixedSizeLots,
    Lots,
    PoissonLots,
    ShuffledLots,
    TruncatedPoissonLots,
    UserLots,
)
from tf_adadp.training.arguments import check_workers


def real_rows(element):
    """The leaves' real rows, in order, as numpy arrays."""
    data, mask = element
    keep = mask.numpy().astype(bool)
    return [leaf.numpy()[keep] for leaf in keras.tree.flatten(data) if leaf is not None]


def ids(elements):
    return [tuple(real_rows(element)[0].tolist()) for element in elements]


def make(seed=5, records=200, expected_size=9):
    return PoissonLots(np.arange(records), expected_size=expected_size, seed=seed)


def read(lots, how, num_lots, size):
    if how == "take":
        return list(lots.take(num_lots, size))
    return list(lots.as_dataset(size, num_lots))


def through_pickle(lots):
    return pickle.loads(pickle.dumps(lots))


@pytest.fixture(params=["dataset", "take"])
def how(request):
    return request.param


class TestForm:
    def test_padding_and_mask(self, how):
        x = np.arange(1, 61, dtype=np.float32).reshape(20, 3)
        y = np.arange(1, 21)
        lots = PoissonLots(x, y, expected_size=6, sample_weight=y / 20, seed=0)
        sizes = set()
        for (bx, by, bw), mask in read(lots, how, 40, 4):
            batches = mask.shape[0]
            assert bx.shape == (batches, 4, 3)
            assert by.shape == bw.shape == mask.shape == (batches, 4)
            assert mask.dtype == bw.dtype == tf.float32
            flat = mask.numpy().ravel()
            count = int(flat.sum())
            sizes.add(count)
            np.testing.assert_array_equal(flat, np.arange(batches * 4) < count)
            assert batches == -(-count // 4)
            rows = by.numpy().ravel()[:count] - 1
            np.testing.assert_array_equal(bx.numpy().reshape(-1, 3)[:count], x[rows])
            np.testing.assert_allclose(bw.numpy().ravel()[:count], (rows + 1) / 20)
            for leaf in (bx.numpy().reshape(-1, 3), by.numpy().ravel(), bw.numpy().ravel()):
                assert not leaf[count:].any()
        assert len(sizes) > 5

    def test_nothing_is_truncated_whatever_the_physical_batch_size(self, how):
        expected = ids(read(make(expected_size=60), "take", 8, 500))
        assert max(map(len, expected)) > 60
        for size in (1, 7, 64):
            assert ids(read(make(expected_size=60), how, 8, size)) == expected

    def test_empty_lots(self, how):
        x = {"a": np.ones((30, 2, 3)), "b": np.array(["s"] * 30)}
        lots = PoissonLots(x, np.ones(30, int), expected_size=0.2, seed=0)
        elements = read(lots, how, 30, 8)
        counts = [int(mask.numpy().sum()) for _, mask in elements]
        assert counts.count(0) > 10  # Of 30 lots 24.6 are expected to be empty.
        assert sum(counts) > 0
        (bx, by, bw), mask = elements[counts.index(0)]
        assert (bx["a"].shape, bx["b"].shape) == ((0, 8, 2, 3), (0, 8))
        assert (by.shape, mask.shape) == ((0, 8), (0, 8))
        assert bx["b"].dtype == tf.string
        assert bw is None

    def test_the_static_shape_fixes_all_but_the_number_of_batches(self):
        lots = PoissonLots({"a": np.ones((9, 2))}, [np.ones(9, int), None], expected_size=3)
        (x, y, weight), mask = lots.as_dataset(4).element_spec
        assert x["a"] == tf.TensorSpec((None, 4, 2), tf.float32)
        assert y[0] == tf.TensorSpec((None, 4), tf.int64)
        assert mask == tf.TensorSpec((None, 4), tf.float32)
        for absent in (y[1], weight):
            assert not isinstance(absent, tf.TensorSpec)
        assert lots.element_spec == (
            {"a": tf.TensorSpec((None, 2), tf.float32)},
            (tf.TensorSpec((None,), tf.int64), None),
            None,
        )

    def test_structures(self, how):
        n = np.arange(50)
        x = {"ids": n, "more": (n * 2.0, [n * 3, n[:, None] * np.ones(4)])}
        y = [n * 5, {"second": n * 6.0}]
        weight = {"w": n / 50}
        for (bx, by, bw), mask in read(PoissonLots(x, y, 6, weight, seed=4), how, 6, 4):
            keep = mask.numpy().astype(bool)
            rows = bx["ids"].numpy()[keep]
            np.testing.assert_array_equal(bx["more"][0].numpy()[keep], rows * 2)
            np.testing.assert_array_equal(bx["more"][1][0].numpy()[keep], rows * 3)
            np.testing.assert_array_equal(bx["more"][1][1].numpy()[keep], np.stack([rows] * 4, 1))
            np.testing.assert_array_equal(by[0].numpy()[keep], rows * 5)
            np.testing.assert_array_equal(by[1]["second"].numpy()[keep], rows * 6)
            np.testing.assert_allclose(bw["w"].numpy()[keep], rows / 50, rtol=1e-6)
            assert isinstance(by, tuple)
            assert isinstance(bx["more"][1], tuple)

    @pytest.mark.parametrize("y", [None, np.arange(20)])
    @pytest.mark.parametrize("weight", [None, np.ones(20)])
    def test_absent_parts_stay_none(self, how, y, weight):
        for (_, by, bw), _ in read(PoissonLots(np.ones((20, 2)), y, 5, weight, seed=1), how, 3, 4):
            assert (by is None) == (y is None)
            assert (bw is None) == (weight is None)

    def test_one_graph_serves_lots_of_all_sizes(self):
        traces = []

        @tf.function
        def consume(iterator):
            traces.append(None)
            (x, _, _), mask = next(iterator)
            return tf.reduce_sum(tf.cast(x, tf.float32) * mask), tf.shape(mask)[0]

        iterator = iter(make(expected_size=20).as_dataset(4))
        results = [consume(iterator) for _ in range(8)]
        assert len(traces) == 1
        assert len({int(batches) for _, batches in results}) > 1
        expected = [sum(lot) for lot in ids(make(expected_size=20).take(8, 4))]
        assert [int(total) for total, _ in results] == expected

    def test_cardinality_is_known(self):
        assert make().as_dataset(4, num_lots=6).cardinality() == 6
        assert make().as_dataset(4).cardinality() == tf.data.INFINITE_CARDINALITY


class TestSteps:
    def test_a_lot_is_a_function_of_seed_and_step(self, how):
        expected = ids(read(make(), how, 10, 4))
        assert len(set(expected)) == 10
        for start in (0, 3, 9):
            lots = make()
            lots.step = start
            assert ids(read(lots, how, 10 - start, 4)) == expected[start:]
            assert ids(make().as_dataset(4, 10 - start, start_step=start)) == expected[start:]
        assert ids(read(make(seed=6), how, 10, 4)) != expected

    def test_take_counts_the_lots_handed_out(self):
        lots = make()
        iterator = lots.take(None, 4)
        assert lots.step == 0
        next(iterator)
        next(iterator)
        assert lots.step == 2

    def test_prefetching_changes_no_lot(self):
        expected = ids(make().take(12, 4))
        lots = make()
        iterator = iter(lots.as_dataset(4))
        first = ids([next(iterator)])
        time.sleep(0.1)  # Prefetching runs ahead of the consumer here.
        assert lots.step > 1
        assert first + ids(next(iterator) for _ in range(4)) == expected[:5]
        lots.step = 5
        assert ids(lots.as_dataset(4, num_lots=7)) == expected[5:]
        # The old iterator neither is moved by the new count nor moves it.
        assert ids(next(iterator) for _ in range(4)) == expected[5:9]
        assert lots.step == 12

    def test_a_finite_dataset_reserves_its_steps_when_it_begins(self):
        lots = make()
        expected = ids(make().take(20, 4))
        dataset = lots.as_dataset(4, num_lots=6)
        assert lots.step == 0
        iterator = iter(dataset)
        assert ids([next(iterator)]) == expected[:1]
        assert lots.step == 6
        assert ids(dataset) == expected[6:12]
        assert lots.step == 12

    def test_every_iteration_draws_new_lots(self):
        expected = ids(make().take(9, 4))
        dataset = make().as_dataset(4, num_lots=3, start_step=0)
        assert ids(dataset) + ids(dataset) + ids(dataset) == expected

    def test_seeded_datasets_with_a_start_step_count_for_themselves(self):
        lots = make()
        first, second = (iter(lots.as_dataset(4, start_step=0)) for _ in range(2))
        pairs = [(ids([next(first)]), ids([next(second)])) for _ in range(5)]
        assert all(one == other for one, other in pairs)

    @pytest.mark.parametrize("kind", [PoissonLots, FixedSizeLots])
    def test_unseeded_lots_never_repeat(self, kind):
        # 50 of 10^6 records: two lots are equal by chance with probability below 10^-200.
        lots = kind(np.arange(10**6), None, 50)
        first, second = lots.as_dataset(64, num_lots=4), lots.as_dataset(64)
        drawn = ids(first) + ids(second.take(4)) + ids(lots.take(4, 64))
        drawn += ids(first) + ids(second.take(4)) + ids(copy.copy(lots).take(4, 64))
        drawn += ids(kind(np.arange(10**6), None, 50).take(4, 64))
        assert len(set(drawn)) == len(drawn) == 28

    def test_unseeded_steps_only_move_forward(self):
        lots = make(seed=None)
        list(lots.take(3, 4))
        lots.step = 5
        assert lots.step == 5
        lots.as_dataset(4, start_step=6)
        assert lots.step == 6
        for change in (lambda: setattr(lots, "step", 4), lambda: lots.as_dataset(4, start_step=4)):
            with pytest.raises(ValueError, match="step cannot go back from 6 to 4"):
                change()

    @pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.5, TypeError)])
    def test_a_bad_step_is_refused(self, step, error):
        with pytest.raises(error, match=f"step={step}: give an integer ≥ 0"):
            make().step = step


class TestSecrets:
    def test_the_key_of_unseeded_lots_is_shown_and_stored_nowhere(self):
        lots = make(seed=None)
        list(lots.take(2, 4))
        secret = lots._key._key
        assert secret.bit_length() > 90  # fails by chance once in 2^37
        for text in (repr(lots), str(lots), str(vars(lots)), repr(lots.as_dataset(4))):
            assert str(secret) not in text
            assert f"{secret:x}" not in text
        stored = pickle.dumps(lots)
        assert secret.to_bytes(16, "little") not in stored
        assert str(secret).encode() not in stored
        assert lots.seed is None
        assert "seed=None" in repr(lots)

    @pytest.mark.parametrize("again", [copy.deepcopy, through_pickle])
    def test_copies_of_unseeded_lots_draw_other_lots(self, again):
        lots = PoissonLots(np.arange(10**5), expected_size=50)
        other = again(lots)
        assert ids(lots.take(3, 64)) != ids(other.take(3, 64))

    @pytest.mark.parametrize("again", [copy.deepcopy, through_pickle])
    def test_copies_of_seeded_lots_continue(self, again):
        lots = make()
        list(lots.take(3, 4))
        other = again(lots)
        assert (other.seed, other.step, other.law) == (5, 3, lots.law)
        assert ids(other.take(3, 4)) == ids(lots.take(3, 4))


@pytest.mark.parametrize("call", ["as_dataset", "take"])
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_bad_counts_are_refused_at_once(call, value, error):
    lots = make()
    for name, other in (("physical_batch_size", "num_lots"), ("num_lots", "physical_batch_size")):
        with pytest.raises(error, match=f"{name}={value}: give an integer ≥ 1"):
            getattr(lots, call)(**{name: value, other: 2})
    assert lots.step == 0


class TestClaims:
    """Subclasses do not inherit a class's claims to enforce its law and to split over hosts."""

    def test_subclasses_claim_nothing(self):
        class Others(PoissonLots):
            pass

        lots = Others(np.arange(20), expected_size=5)
        assert not Others.enforces_law
        assert not Others.splits_over_hosts
        assert lots.law == PoissonSampling(20, 5, declared=True)
        with pytest.raises(ValueError, match="Others on several hosts"):
            check_workers(tf.distribute.get_strategy(), lots, 1, 1)

    def test_subclasses_may_claim_for_themselves(self):
        class Others(PoissonLots, enforces_law=True):
            pass

        assert Others(np.arange(20), expected_size=5).law == PoissonSampling(20, 5)
        assert not Others.splits_over_hosts

    def test_subclasses_cannot_pass_by_the_mark_of_declared_laws(self):
        with pytest.raises(TypeError, match="Mine overrides `law`"):

            class Mine(PoissonLots):
                @property
                def law(self):
                    return PoissonSampling(20, 5)

        class Mixin:
            law = PoissonSampling(20, 5)

        with pytest.raises(TypeError, match="Others overrides `law`"):

            class Others(Mixin, PoissonLots):
                pass

    def test_a_law_that_is_set_later_is_marked_too(self):
        class Others(PoissonLots):
            def __init__(self, x):
                super().__init__(x, expected_size=5)
                self._law = PoissonSampling(20, 4)

        assert Others(np.arange(20)).law == PoissonSampling(20, 4, declared=True)

    def test_lots_of_the_package(self):
        enforcing = {PoissonLots, FixedSizeLots, ShuffledLots, TruncatedPoissonLots, UserLots}
        kinds = {getattr(sampling, name) for name in sampling.__all__} - {sampling.make_lot}
        assert {kind for kind in kinds if kind.enforces_law} == enforcing
        assert {kind for kind in kinds if kind.splits_over_hosts} == {PoissonLots}

    @pytest.mark.parametrize(
        ("law", "error", "match"),
        [
            (None, TypeError, "law=None: give a sampling law"),
            (PoissonSampling, TypeError, "give a sampling law"),
            (UnknownSampling("why"), ValueError, "has no expected lot size"),
        ],
    )
    def test_lots_need_a_law(self, law, error, match):
        class Mine(Lots):
            def _rows(self, step, multiple):
                return 0, []

        with pytest.raises(error, match=match):
            Mine(law, (None, None, None))


def test_no_record_makes_numpy_warn():
    """A warning may be an error, and would come only with the lot that drew the record."""
    x = np.zeros((8, 2))
    x[3] = 1e300  # beyond float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _, mask in PoissonLots(x, expected_size=8, seed=1).as_dataset(8, 2):
            assert mask.numpy().sum() == 8
