"""Private principal components: what is released, what it costs, and that models know of it."""

import copy
import fractions
import math
import pickle
import warnings

import dp_accounting
import keras
import numpy as np
import pytest
import scipy.stats
import sklearn.datasets
import sklearn.decomposition
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tf_adadp as dp
from tests.helpers import crossentropy
from tf_adadp.pca import DPPCA, PCAProjection
from tf_adadp.pca.dppca import add_symmetric_noise, second_moment
from tf_adadp.pca.rows import LENGTH, unit_rows

# Seeds are fixed, so these tests pass or fail for good. Over random seeds a KS test at this level
# would raise a false alarm once in a million; the wrong scales below are rejected at 1e-12.
FALSE_ALARM = 1e-6


def digits():
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    return x.reshape(-1, 8, 8), y


def exact(n_components, **kwargs):
    return DPPCA(n_components, 0, allow_no_noise=True, **kwargs)


def released(pca):
    """The noisy second moment, put together again from all its components and eigenvalues."""
    return pca.components_.T @ np.diag(pca.explained_variance_) @ pca.components_


def triangle(matrix):
    return matrix[np.triu_indices(len(matrix))]


# --- what is computed -----------------------------------------------------------------------------


def slow_moment(x):
    """Σ x xᵀ of normalised rows, entry by entry."""
    total = np.zeros((x[0].size, x[0].size))
    for record in x:
        row = np.ravel(record).astype(np.float64)
        if np.all(np.isfinite(row)) and np.any(row):
            row = row / np.max(np.abs(row))
            row = row / math.sqrt(math.fsum(v * v for v in row))
            total += np.outer(row, row)
    return total


def test_second_moment_is_that_of_a_loop_over_records():
    x = digits()[0][:300].copy()
    x[5], x[6, 2, 3], x[7, 1, 1], x[8], x[9] = 0.0, np.nan, np.inf, x[8] * 1e30, x[9] * 1e-300
    np.testing.assert_allclose(second_moment(x), LENGTH**2 * slow_moment(x), rtol=1e-12)
    assert np.trace(second_moment(x)) == pytest.approx(297 * LENGTH**2, rel=1e-12)


def test_components_without_noise_span_what_scikit_learn_finds():
    x = digits()[0].reshape(-1, 64)
    pca = exact(12).fit(x)
    reference = sklearn.decomposition.TruncatedSVD(12, algorithm="arpack")
    reference.fit(x / np.linalg.norm(x, axis=1, keepdims=True))
    ours, theirs = pca.components_, reference.components_
    np.testing.assert_allclose(ours.T @ ours, theirs.T @ theirs, atol=1e-9)
    variances = (LENGTH * reference.singular_values_) ** 2
    np.testing.assert_allclose(pca.explained_variance_, variances, rtol=1e-9)
    np.testing.assert_allclose(np.abs(np.sum(ours * theirs, axis=1)), 1.0, atol=1e-9)
    total = np.linalg.eigvalsh(second_moment(x)).sum()
    np.testing.assert_allclose(pca.explained_variance_ratio_, pca.explained_variance_ / total)
    assert np.all(ours[np.arange(12), np.abs(ours).argmax(1)] > 0)
    assert pca.n_features_in_ == 64


@pytest.mark.parametrize("normalize", [True, False])
def test_transform_and_back(normalize):
    x = digits()[0]
    pca = exact(64, normalize=normalize).fit(x)
    rows = x.reshape(-1, 64)
    if normalize:
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    z = pca.transform(x)
    np.testing.assert_allclose(z, rows @ pca.components_.T, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(pca.inverse_transform(z), rows, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(pca.fit_transform(x), z)
    assert pca.transform(x[:0]).shape == (0, 64)


def batches(x, size=100):
    return [x[i : i + size] for i in range(0, len(x), size)]


SOURCES = {
    "list": batches,
    "generator": lambda x: (b for b in batches(x)),
    "dataset": lambda x: tf.data.Dataset.from_tensor_slices(x).batch(100),
    "tensor": tf.constant,
    "with an empty batch": lambda x: [x[:0], *batches(x), x[:0]],
    "flat": lambda x: x.reshape(len(x), -1),
}


@pytest.mark.representative(2)
@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_batches_are_as_good_as_an_array(make):
    x = digits()[0]
    whole = DPPCA(5, 4.0, seed=1).fit(x)
    parts = DPPCA(5, 4.0, seed=1).fit(make(x))
    np.testing.assert_allclose(parts.components_, whole.components_, atol=1e-10)
    np.testing.assert_allclose(parts.explained_variance_, whole.explained_variance_)
    np.testing.assert_allclose(parts.transform(make(x)), whole.transform(x), atol=1e-10)


@pytest.mark.parametrize("dtype", ["float16", "float32", "uint8", "int64", "bool"])
def test_every_real_type_will_do(dtype):
    x = digits()[0].astype(dtype)
    np.testing.assert_allclose(second_moment(x), second_moment(x.astype(np.float64)))


# --- sensitivity ----------------------------------------------------------------------------------

ENTRIES = st.one_of(
    st.sampled_from(
        [0.0, -0.0, 5e-324, 1e-310, 1e-160, 1.0, 1e30, 1.7e308, np.nan, np.inf, -np.inf]
    ),
    st.floats(width=64),
)
WIDTH = 5
ROWS = st.one_of(
    hnp.arrays(np.float64, WIDTH, elements=ENTRIES),
    hnp.arrays(np.float32, WIDTH),
    hnp.arrays(np.float16, WIDTH),
    hnp.arrays(np.int64, WIDTH),
    hnp.arrays(np.uint8, WIDTH),
    # The worst: a single entry, for which nothing is lost below the diagonal.
    st.tuples(st.integers(0, WIDTH - 1), ENTRIES).map(
        lambda p: np.where(np.eye(WIDTH)[p[0]], p[1], 0.0)
    ),
)


@settings(deadline=None, max_examples=300)
@given(ROWS, ROWS, st.integers(0, 2**32 - 1))
def test_sensitivity(one, other, seed):
    """Adding a record moves the upper triangle by at most 1, replacing it by at most √2."""
    rest = np.random.default_rng(seed).normal(size=(seed % 300, WIDTH))
    without = triangle(second_moment([rest, np.zeros((1, WIDTH))]))
    first, second = (triangle(second_moment([rest, row[None]])) for row in (one, other))
    for moved in (first, second):
        assert np.all(np.isfinite(moved))
        assert np.linalg.norm(moved - without) <= 1.0
    assert np.linalg.norm(first - second) <= math.sqrt(2.0)


@settings(deadline=None, max_examples=300)
@given(ROWS)
def test_no_row_is_longer_than_one_in_exact_arithmetic(row):
    unit = unit_rows(row[None])[0]
    length = sum(fractions.Fraction(v) ** 2 for v in unit.tolist())
    direction = np.all(np.isfinite(row)) and np.any(row)
    assert length < 1
    assert abs(length - fractions.Fraction(LENGTH) ** 2) < 1e-12 if direction else length == 0


def test_the_bounds_are_reached():
    moment = [triangle(second_moment(row[None])) for row in np.eye(3)]
    assert np.linalg.norm(moment[0]) == pytest.approx(LENGTH**2, rel=1e-12)
    difference = np.linalg.norm(moment[0] - moment[1])
    assert difference == pytest.approx(math.sqrt(2.0) * LENGTH**2, rel=1e-12)
    assert LENGTH > 0.999999


def test_rounding_of_long_sums_stays_within_the_bound():
    rng = np.random.default_rng(0)
    x = np.abs(rng.normal(size=(200_000, 3))) ** 4  # sums of one sign, whose errors add up
    x = np.concatenate([[[0.0, 1.0, 0.0]], x])
    batches = [x[1 + i : 257 + i] for i in range(0, 200_000, 256)]  # more sums than x has blocks
    with_first = triangle(second_moment([x[:1], *batches]))
    without = triangle(second_moment(batches))
    # The length of rows leaves 1.9e-6.
    assert np.linalg.norm(with_first - without) == pytest.approx(1 - 2.0**-19, abs=1e-10)
    units = unit_rows(x)
    exactly = [
        math.fsum(units[:, i] * units[:, j]) for i, j in zip(*np.triu_indices(3), strict=True)
    ]
    # Two units in the last place; a sum of 782 batches without the error terms is off by eight.
    np.testing.assert_array_less(np.abs(with_first - exactly), 2 * np.spacing(with_first))


def test_no_warning_tells_what_the_data_hold():
    x = np.zeros((7, 4))
    x[1:5, 0] = [np.nan, np.inf, 1.7e308, 5e-324]
    x[3, 1] = -1.7e308
    x[5] = [1.0, 1e-300, 1e-300, 0]
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for normalize in (True, False):
            pca = DPPCA(2, 4.0, normalize=normalize, seed=0)
            pca.fit(x).transform(x)
            pca.fit(x.astype(np.longdouble) * 10).transform(x)
            pca.fit(np.zeros((3, 4)))
            assert np.all(np.isfinite(pca.components_))
        exact(2).fit(np.zeros((3, 4)))


def test_a_data_set_of_zeros_has_no_variance():
    pca = exact(2).fit(np.zeros((3, 4)))
    np.testing.assert_array_equal(pca.explained_variance_, [0, 0])
    np.testing.assert_array_equal(pca.explained_variance_ratio_, [0, 0])
    np.testing.assert_array_equal(pca.transform(np.zeros((3, 4))), np.zeros((3, 2)))


# --- noise ----------------------------------------------------------------------------------------


@pytest.mark.representative(1)
@pytest.mark.parametrize("relation", ["add_or_remove", "replace_one"])
def test_noise_of_what_is_released(relation):
    sigma, size = 5.0, 60
    x = np.random.default_rng(1).normal(size=(50, size))
    pca, noise = DPPCA(size, sigma, seed=3, neighboring_relation=relation), []
    for _ in range(100):
        noise.append(released(pca.fit(x)) - second_moment(x))
    noise = np.stack(noise)
    upper = np.triu_indices(size, 1)
    for values in (noise[:, *upper], np.diagonal(noise, axis1=1, axis2=2)):
        for factor, accepted in ((1.0, True), (0.67, False), (1.5, False)):
            p_value = scipy.stats.kstest(values.ravel() / (factor * sigma), "norm").pvalue
            assert p_value > FALSE_ALARM if accepted else p_value < 1e-12
    # 5σ of a correlation of n independent pairs is 5/√n: a false alarm in 1.7 million.
    values = noise[:, *upper]
    for one, other in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / math.sqrt(one.size)


def test_noise_is_symmetric_and_leaves_the_mirror_image_out():
    rng = np.random.default_rng(0)
    moment = np.array([[1.0, 2.0], [1e9, 3.0]])  # the entry below the diagonal must not be read
    noisy = add_symmetric_noise(moment, 0.5, rng)
    np.testing.assert_array_equal(noisy, noisy.T)
    assert np.abs(noisy).max() < 10
    assert noisy[0, 1] != 2.0
    np.testing.assert_array_equal(add_symmetric_noise(moment, 0.0, rng), [[1, 2], [2, 3]])


def test_noise_is_never_drawn_twice():
    x = np.zeros((4, 6))
    first = DPPCA(6, 1.0)
    clones = [DPPCA.from_config(first.get_config()), copy.deepcopy(first)]
    clones.append(pickle.loads(pickle.dumps(first)))
    pcas = [first, *clones, DPPCA(6, 1.0, seed=1), DPPCA(6, 1.0, seed=2)]
    noise = [released(pca.fit(x)) for pca in pcas for _ in range(2)]
    for i, one in enumerate(noise):
        for other in noise[:i]:
            assert np.abs(one - other).max() > 1e-3
    again = DPPCA(6, 1.0, seed=1)
    np.testing.assert_array_equal(released(again.fit(x)), noise[8])
    np.testing.assert_array_equal(released(again.fit(x)), noise[9])


def test_negative_eigenvalues_are_shown_and_take_no_part_in_ratios():
    pca = DPPCA(30, 2.0, seed=0).fit(np.zeros((3, 30)))
    values, ratio = pca.explained_variance_, pca.explained_variance_ratio_
    assert values[0] > 0 > values[-1]
    assert np.all(np.diff(values) <= 0)
    np.testing.assert_allclose(ratio, np.maximum(values, 0) / np.maximum(values, 0).sum())


# --- cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "expected"), [(16, 0.226), (7, 0.552), (6, 0.652), (4, 1.013)])
def test_epsilon_of_one_fit(sigma, expected):
    pca = DPPCA(2, sigma)
    assert pca.ledger.epsilon(1e-5) == 0
    pca.fit(np.zeros((3, 4)))
    assert pca.ledger.epsilon(1e-5) == pytest.approx(expected, abs=5e-4)
    pca.fit(np.zeros((3, 4)))  # another release; two of σ are one of σ/√2
    both = dp.PrivacyLedger()
    both.add(dp_accounting.GaussianDpEvent(sigma / math.sqrt(2)))
    assert pca.ledger.epsilon(1e-5) == pytest.approx(both.epsilon(1e-5))


def test_what_the_ledger_says():
    relation = dp_accounting.NeighboringRelation
    cases = [
        (DPPCA(1, 3.0), 3.0, relation.ADD_OR_REMOVE_ONE, False),
        (
            DPPCA(1, 3.0, neighboring_relation="replace_one"),
            3 / 2**0.5,
            relation.REPLACE_ONE,
            False,
        ),
        (DPPCA(1, 3.0, seed=0), 3.0, relation.ADD_OR_REMOVE_ONE, True),
    ]
    for pca, sigma, neighbouring, seeded in cases:
        assert pca.event == dp_accounting.GaussianDpEvent(pytest.approx(sigma))
        entry, *more = pca.fit(np.zeros((3, 4))).ledger.entries
        assert not more
        assert entry.event == pca.event
        assert entry.neighboring_relation is neighbouring
        assert (entry.count, entry.origin, entry.law) == (1, "DPPCA", None)
        assert entry.reproducible_noise is seeded
        assert ("reproducible noise" in pca.ledger.statement(1e-5)) is seeded


def test_no_noise_costs_everything():
    assert exact(1).event == dp_accounting.NonPrivateDpEvent()
    assert exact(1).fit(np.zeros((3, 4))).ledger.epsilon(1e-5) == math.inf


def test_charged_before_the_noise_is_drawn(monkeypatch):
    def power_cut(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("tf_adadp.pca.dppca.add_symmetric_noise", power_cut)
    pca, ledger = DPPCA(1, 3.0), dp.PrivacyLedger()
    with pytest.raises(KeyboardInterrupt):
        pca.fit(np.zeros((3, 4)), ledger=ledger)
    assert pca.ledger.steps == ledger.steps == 1


def test_another_ledger_is_charged_once_however_often_it_is_merged():
    ledger, pca = dp.PrivacyLedger(), DPPCA(1, 3.0)
    pca.fit(np.zeros((3, 4)), ledger=ledger)
    ledger.merge(pca.ledger)
    ledger.merge(pca.layer().ledger)
    assert ledger.steps == 1
    pca.fit(np.zeros((3, 4)), ledger=ledger)
    assert ledger.steps == 2
    other = DPPCA(1, 3.0, neighboring_relation="replace_one").fit(np.zeros((3, 4)), ledger=ledger)
    assert other.ledger.epsilon(1e-5) > 0
    with pytest.raises(ValueError, match="ADD_OR_REMOVE_ONE and REPLACE_ONE"):
        ledger.epsilon(1e-5)


# --- in a model -----------------------------------------------------------------------------------


def projected(layer, **wrap):
    model = keras.Sequential([keras.Input((8, 8)), layer, keras.layers.Dense(10)])
    private = dp.DPModel(model, **wrap)
    private.compile(
        optimizer=dp.DPSGD(4.0, noise_multiplier=1.0, seed=0),
        loss=crossentropy(),
        metrics=["accuracy"],
    )
    return private


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["ghost", "vectorized"])
def test_a_model_on_raw_inputs_trains_and_knows_the_cost(engine, tmp_path):
    x, y = digits()
    pca = DPPCA(20, 8.0, seed=0).fit(x)
    private = projected(pca.layer(), gradient_engine=engine)
    assert private.epsilon(1e-4) == pca.ledger.epsilon(1e-4) > 0
    private.fit(x, y, batch_size=200, epochs=6, verbose=0)
    assert private.evaluate(x, y, verbose=0)[1] > 0.7  # 0.10 by guessing
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(8.0))
    step = dp_accounting.GaussianDpEvent(1.0)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(200 / len(x), step), 6 * 9)
    spent = private.epsilon(1e-4)
    assert spent == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-9)
    # Merging by hand changes nothing, and what models do is not in the ledger of the components.
    private.ledger.merge(pca.ledger)
    assert private.epsilon(1e-4) == spent
    assert pca.ledger.steps == 1
    assert projected(pca.layer()).ledger.steps == 1
    np.testing.assert_allclose(private.model.layers[0].components, pca.components_, atol=1e-7)

    private.save(tmp_path / "private.keras")
    private.model.save(tmp_path / "plain.keras")
    loaded = dp.load_model(tmp_path / "private.keras")
    plain = keras.saving.load_model(tmp_path / "plain.keras")
    expected = private.predict(x, verbose=0)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)
    np.testing.assert_array_equal(plain.predict(x, verbose=0), expected)
    assert loaded.epsilon(1e-4) == spent
    assert dp.DPModel(plain).epsilon(1e-4) == spent


@pytest.mark.extended
def test_rows_that_come_from_transform_are_charged_by_the_ledger_given():
    x, y = digits()
    private = dp.DPModel(keras.Sequential([keras.Input((5,)), keras.layers.Dense(10)]))
    private.compile(optimizer=dp.DPSGD(4.0, noise_multiplier=1.0), loss=crossentropy())
    z = DPPCA(5, 8.0).fit_transform(x, ledger=private.ledger)
    private.fit(z, y, batch_size=200, verbose=0)
    assert [e.origin for e in private.ledger.entries] == ["DPPCA", "DPSGD"]


@pytest.mark.extended
def test_the_budget_of_a_callback_counts_the_components():
    x, y = digits()
    steps = []
    for sigma in (8.0, 2.0):
        private = projected(DPPCA(5, sigma).fit(x).layer())
        budget = dp.PrivacyCallback(1e-4, max_epsilon=3.0)
        private.fit(x, y, batch_size=200, epochs=20, verbose=0, callbacks=[budget])
        assert private.epsilon(1e-4) <= 3.0
        steps.append(int(private.optimizer.iterations))
    assert steps[0] > steps[1] > 0


NO_DIRECTION = [[0, 0, 0], [np.nan, 1, 0], [1, np.inf, 0], [np.inf, np.nan, 0]]
ODD = np.array([*NO_DIRECTION, [1e30, -1e30, 3e38], [1e-30, 0, 2e-30]], np.float32)


@pytest.mark.extended
@pytest.mark.parametrize("jit", [False, True])
def test_the_layer_does_what_transform_does(jit):
    x = digits()[0].astype(np.float32)
    for normalize in (True, False):
        pca = DPPCA(7, 4.0, normalize=normalize).fit(x)
        layer = tf.function(pca.layer(), jit_compile=jit)
        np.testing.assert_allclose(layer(x), pca.transform(x), rtol=1e-5, atol=1e-5)
    pca = DPPCA(3, 4.0).fit(ODD)
    layer = tf.function(pca.layer(), jit_compile=jit)
    np.testing.assert_allclose(layer(ODD), pca.transform(ODD), atol=1e-6)
    assert not np.any(layer(ODD)[:4])
    assert np.all(np.any(layer(ODD)[4:] != 0, axis=1))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float16", "float64"])
def test_the_layer_takes_raw_inputs_of_any_type(dtype):
    x = digits()[0].astype(dtype)
    x[0] *= {"float16": 4000, "float64": 1e300}.get(dtype, 1)  # squares would overflow
    pca = DPPCA(7, 4.0).fit(x)
    for policy, atol in (("float32", 1e-5), ("mixed_float16", 1e-3)):
        layer = PCAProjection.from_config({**pca.layer().get_config(), "dtype": policy})
        layer.set_weights([pca.components_])
        np.testing.assert_allclose(layer(x), pca.transform(x), atol=atol)
        assert layer(x).dtype == layer.compute_dtype


def test_the_components_are_not_trained_and_examples_do_not_meet():
    x, y = digits()
    layer = DPPCA(7, 4.0).fit(x).layer("projection")
    assert layer.name == "projection"
    assert not layer.trainable_variables
    assert len(layer.non_trainable_variables) == 1
    whole, poisoned = layer(x[:20]), x[:20].copy()
    poisoned[3] = np.nan
    np.testing.assert_array_equal(np.delete(layer(poisoned), 3, 0), np.delete(whole, 3, 0))
    before = layer.get_weights()[0]
    projected(layer).fit(x, y, batch_size=200, verbose=0)
    np.testing.assert_array_equal(layer.get_weights()[0], before)


def test_clones_and_weights_files_carry_the_cost(tmp_path):
    x = digits()[0]
    model = keras.Sequential([keras.Input((8, 8)), DPPCA(7, 4.0).fit(x).layer()])
    other = keras.Sequential([keras.Input((8, 8)), DPPCA(7, 4.0).fit(x).layer()])
    public = keras.Sequential([keras.Input((8, 8)), PCAProjection(7, 64, public=True)])
    assert public.layers[0].ledger is None
    assert dp.DPModel(keras.models.clone_model(model)).ledger.steps == 1
    assert dp.DPModel(copy.deepcopy(model)).ledger.steps == 1
    model.save_weights(tmp_path / "w.weights.h5")
    for loading, releases in ((public, 1), (other, 2)):
        loading.load_weights(tmp_path / "w.weights.h5")
        np.testing.assert_array_equal(loading.predict(x, verbose=0), model.predict(x, verbose=0))
        assert dp.DPModel(loading).ledger.steps == releases
    restored = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(model.layers[0])
    )
    assert restored.get_config() == model.layers[0].get_config()


def test_public_components_cost_nothing(tmp_path):
    layer = PCAProjection(3, 64, public=True)
    layer.set_weights([np.eye(3, 64)])
    private = projected(layer)
    assert private.epsilon(1e-4) == 0
    private.model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert loaded.layers[0].ledger is None
    np.testing.assert_array_equal(loaded.get_weights()[0], np.eye(3, 64))


def test_saving_the_components(tmp_path):
    x = digits()[0]
    pca = DPPCA(7, 4.0, neighboring_relation="replace_one", normalize=False, seed=3).fit(x)
    pca.save(tmp_path / "pca")
    loaded = DPPCA.load(tmp_path / "pca")
    assert loaded.get_config() == pca.get_config()
    assert loaded.ledger.to_json() == pca.ledger.to_json()
    assert loaded.n_features_in_ == 64
    np.testing.assert_array_equal(loaded.transform(x), pca.transform(x))
    np.testing.assert_array_equal(loaded.explained_variance_, pca.explained_variance_)
    np.testing.assert_array_equal(loaded.explained_variance_ratio_, pca.explained_variance_ratio_)
    loaded.fit(x)
    pca.fit(x)
    np.testing.assert_array_equal(loaded.components_, pca.components_)
    loaded.ledger.merge(pca.ledger)  # one release before the file, and one of each since
    assert loaded.ledger.steps == 3


# --- bad input ------------------------------------------------------------------------------------

X = np.ones((6, 4))
BAD_ARGUMENTS = [
    ({"n_components": 0}, "n_components=0: give an integer ≥ 1"),
    ({"n_components": 2.5}, "n_components=2.5"),
    ({"n_components": True}, "n_components=True"),
    ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0: give a finite number above 0"),
    ({"noise_multiplier": math.nan}, "noise_multiplier=nan"),
    ({"noise_multiplier": math.inf}, "noise_multiplier=inf"),
    ({"noise_multiplier": None}, "noise_multiplier=None"),
    ({"noise_multiplier": 0}, "noise_multiplier=0 adds no noise.*allow_no_noise=True"),
    ({"neighboring_relation": "swap"}, "neighboring_relation='swap'.*'replace_one'"),
    ({"normalize": 1}, "normalize=1: give True or False"),
    ({"seed": -1}, "seed=-1: give an integer of at least 0"),
    ({"seed": 1.5}, "seed=1.5"),
    ({"allow_no_noise": None}, "allow_no_noise=None"),
]


@pytest.mark.parametrize(("arguments", "match"), BAD_ARGUMENTS)
def test_bad_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        DPPCA(**{"n_components": 2, "noise_multiplier": 4.0, **arguments})


def test_the_noise_multiplier_has_no_default():
    with pytest.raises(TypeError, match="noise_multiplier"):
        DPPCA(2)


BAD_DATA = [
    (X[:0], ValueError, "x has no records"),
    ([], ValueError, "x has no records"),
    (X[:, :0], ValueError, r"x has shape \(6, 0\): give at least one feature"),
    (X[:, :1], ValueError, "n_components=2: x has 1 features"),
    (X[0], ValueError, r"x has shape \(4,\): give an array \[N, ...\]"),
    (np.float64(3), ValueError, r"x has shape \(\)"),
    (X.tolist(), TypeError, "batch 0 of x is a list: give arrays"),
    ([X.tolist()], TypeError, "batch 0 of x is a list: give arrays"),  # whose values tell a dtype
    (X.astype(complex), ValueError, "x has dtype complex128: give real numbers"),
    (X.astype(str), ValueError, "x has dtype <U"),
    (X.astype(object), ValueError, "x has dtype object"),
    ([X, X[:, :3]], ValueError, "batch 1 of x has 3 features: give 4, as in the first batch"),
    ([(X, X)], TypeError, "batch 0 of x is a tuple.*lambda x, y: x"),
    ([{"a": X}], TypeError, "batch 0 of x is a dict"),
    (None, TypeError, "x is a NoneType: give an array"),
    (3, TypeError, "x is a int"),
]


@pytest.mark.parametrize(("x", "error", "match"), BAD_DATA)
def test_bad_data_is_refused_and_costs_nothing(x, error, match):
    pca, ledger = DPPCA(2, 4.0), dp.PrivacyLedger()
    with pytest.raises(error, match=match):
        pca.fit(x, ledger=ledger)
    assert pca.ledger.steps == ledger.steps == 0
    assert not hasattr(pca, "components_")
    assert not hasattr(pca, "n_features_in_")


def test_bad_uses(tmp_path):
    pca = DPPCA(2, 4.0)
    for use in (pca.transform, pca.inverse_transform, pca.save):
        with pytest.raises(RuntimeError, match=f"{use.__name__} before fit"):
            use(X)
    with pytest.raises(RuntimeError, match="layer before fit"):
        pca.layer()
    with pytest.raises(TypeError, match="ledger='a.json': give a PrivacyLedger"):
        pca.fit(X, ledger="a.json")
    with pytest.raises(TypeError, match="x is a generator, which can be read once"):
        pca.fit_transform(b for b in [X])
    assert pca.ledger.steps == 0
    pca.fit(X)
    with pytest.raises(ValueError, match="x has 3 features: give 4, as in fit"):
        pca.transform(X[:, :3])
    with pytest.raises(ValueError, match="batch 1 of x has 3 features: give 4, as in fit"):
        pca.transform([X, X[:, :3]])
    with pytest.raises(ValueError, match=r"z has shape \(6, 4\): give \[N, 2\]"):
        pca.inverse_transform(X)
    for shape in ((3,), (None, 4)):
        with pytest.raises(ValueError, match="give inputs of 4 entries each"):
            pca.layer()(keras.Input(shape))
    with pytest.raises(ValueError, match="n_features=0"):
        PCAProjection(2, 0)
    with pytest.raises(ValueError, match="ledger='a.json'"):
        PCAProjection(2, 4, ledger="a.json")


def _parse_float32(row):
    return tf.io.parse_tensor(row, tf.float32)


def test_unbatched_images_are_no_batches():
    images = tf.data.Dataset.from_tensor_slices(np.ones((20, 6, 6), np.float32))
    pca = DPPCA(2, noise_multiplier=4.0)
    with pytest.raises(ValueError, match="batch it"):
        pca.fit(images)
    pictures = tf.image.encode_png(np.ones((4, 3, 1), np.uint8))
    rows = tf.io.serialize_tensor(np.ones((3, 4), np.float32))
    for files, decode in ((pictures, tf.image.decode_png), (rows, _parse_float32)):
        unknown = tf.data.Dataset.from_tensors(files).map(decode)  # of no known size
        match = r"shape (\(None, None, None\)|<unknown>).*ensure_shape"
        with pytest.raises(ValueError, match=match):
            pca.fit(unknown)
    assert pca.ledger.steps == 0
    assert pca.fit(images.batch(7)).n_features_in_ == 36


def test_components_without_their_ledger_fail_closed(tmp_path):
    pca = DPPCA(3, noise_multiplier=4.0).fit(np.eye(64))
    stranger = PCAProjection(3, 64)
    private = dp.DPModel(keras.Sequential([keras.Input((64,)), stranger, keras.layers.Dense(2)]))
    stranger.set_weights(pca.layer().get_weights())
    with pytest.raises(ValueError, match="without their ledger"):
        private.epsilon(1e-5)
