"""The law of the noise, its streams, and the secrecy of its key."""

import copy
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import zipfile

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tf_adadp as dp
from tf_adadp import noise
from tf_adadp.audit.releases import recorded_releases
from tf_adadp.utils import flat_groups

KEY = noise.new_key(7)
# Keys are fixed, so these tests pass or fail for good. Over random keys a KS test at this level
# would raise a false alarm once in a million; the wrong scales below are rejected at 1e-50.
FALSE_ALARM = 1e-6


def _draw(key=KEY, step=3, index=0, shape=(20_000,), stddev=1.0):
    return noise.gaussian(tf.constant(key), tf.constant(step, tf.int64), index, shape, stddev)


def _p_value(values, stddev=1.0):
    return scipy.stats.kstest(np.ravel(values).astype(np.float64) / stddev, "norm").pvalue


# --- law ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("index", "shape"), [(0, (300, 70)), (1, (20_000,)), (2, (3, 50, 150))])
def test_standard_deviation_of_each_variable(index, shape, jit):
    sigma = 2.5 + index
    draw = tf.function(lambda: _draw(index=index, shape=shape, stddev=sigma), jit_compile=jit)
    values = draw().numpy()
    assert values.shape == shape
    assert values.dtype == np.float32
    assert _p_value(values, sigma) > FALSE_ALARM
    assert _p_value(values, 0.67 * sigma) < 1e-50
    assert _p_value(values, 1.5 * sigma) < 1e-50


def test_standard_deviation_of_each_coordinate():
    stddev = np.geomspace(1e-20, 1e10, 40).astype(np.float32)
    values = _draw(shape=(2000, 40), stddev=stddev).numpy()
    p_values = [_p_value(values[:, i], stddev[i]) for i in range(40)]
    assert min(p_values) > FALSE_ALARM
    np.testing.assert_array_equal(_draw(shape=(4, 5), stddev=0.0), np.zeros((4, 5)))


def test_first_draws_of_many_steps_and_variables_are_independent_normals():
    """Compares neighbouring seeds over 100 steps of 40 variables of 3 scalars."""

    @tf.function
    def first_draws(step):
        return tf.stack([noise.gaussian(tf.constant(KEY), step, i, (3,), 1.0) for i in range(40)])

    values = np.stack([first_draws(tf.constant(t, tf.int64)) for t in range(100)])
    assert _p_value(values) > FALSE_ALARM
    assert len(np.unique(values[..., 0])) > 3_990
    for axis in range(3):
        ahead, behind = np.swapaxes(values, 0, axis)[1:], np.swapaxes(values, 0, axis)[:-1]
        # 5σ of a correlation of n independent pairs is 5/√n: a false alarm in 1.7 million.
        correlation = np.corrcoef(ahead.ravel(), behind.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(ahead.size)


# --- streams --------------------------------------------------------------------------------------


def _compiled(jit):
    return tf.function(lambda k, t: noise.gaussian(k, t, 1, (64,), 1.0), jit_compile=jit)


def test_equal_arguments_give_equal_noise_in_graphs_too():
    step = tf.constant(3, tf.int64)
    np.testing.assert_array_equal(_draw(), _draw())
    np.testing.assert_array_equal(_draw(index=1, shape=(64,)), _compiled(False)(KEY, step))
    np.testing.assert_array_equal(_compiled(True)(KEY, step), _compiled(True)(KEY, step))


@pytest.mark.parametrize("jit", [False, True])
def test_each_word_of_the_key_and_the_step_matter(jit):
    draw = _compiled(jit)
    base = draw(KEY, tf.constant(3, tf.int64)).numpy()
    others = [draw(KEY, tf.constant(step, tf.int64)) for step in (0, 2, 4, 2**40)]
    for word in (0, 1):
        for bit in (0, 31, 32, 63):
            changed = KEY.copy()
            changed[word] ^= np.int64(-(2**63) if bit == 63 else 1 << bit)
            others.append(draw(changed, tf.constant(3, tf.int64)))
    for other in others:
        assert not np.any(base == other.numpy())


def test_variables_differ():
    assert not np.any(_draw(index=0).numpy() == _draw(index=1).numpy())


def test_words_wrap_around():
    largest = np.array([2**63 - 1, 2**63 - 1])
    assert _p_value(_draw(key=largest, step=5, index=9)) > FALSE_ALARM


def test_small_variables_share_a_stream_and_large_ones_do_not():
    sizes = [3, 5, flat_groups.LARGEST_GROUP, 4, 7]
    drawn = noise.gaussians(KEY, 3, [(n,) for n in sizes], [1.0] * 5, index=2)
    np.testing.assert_array_equal(tf.concat(drawn[:2], 0), _draw(index=2, shape=(8,)))
    np.testing.assert_array_equal(drawn[2], _draw(index=4, shape=(sizes[2],)))
    np.testing.assert_array_equal(tf.concat(drawn[3:], 0), _draw(index=5, shape=(11,)))


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_variables_of_one_stream_have_their_own_noise(dtype):
    """Laws, scales per variable and per coordinate, and that no two share numbers or correlate."""
    shapes, column = [(), (60, 50), (3000,), (0, 4), (3000, 1)], np.geomspace(1e-3, 1e3, 50)
    stddevs = [1.0, column[None, :], tf.constant(4.0), 1.0, 0.5]
    drawn = noise.gaussians(KEY, 3, shapes, stddevs, dtype)
    assert [tuple(d.shape) for d in drawn] == shapes
    assert {d.dtype for d in drawn} == {dtype}
    normals = [np.ravel(d / tf.cast(s, dtype)) for d, s in zip(drawn, stddevs, strict=True)]
    large = [n for n in normals if n.size == 3000]
    for values in large:
        assert _p_value(values) > FALSE_ALARM
    for i in range(3):
        # 5σ of a correlation of n independent pairs is 5/√n: a false alarm in 1.7 million.
        assert abs(np.corrcoef(large[i], large[i - 1])[0, 1]) < 5 / np.sqrt(3000)
        assert not np.any(large[i] == large[i - 1])
    again = tf.function(lambda step: noise.gaussians(KEY, step, shapes, stddevs, dtype))
    for step in (3, 4):
        other = np.concatenate([np.ravel(v) for v in again(tf.constant(step, tf.int64))])
        same = np.isclose(other, np.concatenate([np.ravel(d) for d in drawn]), rtol=1e-5)
        assert np.all(same) if step == 3 else np.mean(same) < 0.01


# --- secure noise ---------------------------------------------------------------------------------


def _released(value, stddev, noise_multiplier=1.0, step=3, key=KEY, jit=False):
    """One array with secure noise; and the noise's standard deviation."""

    def run():
        values, stddevs = [tf.constant(value)], [tf.constant(stddev)]
        arguments = {"noise_multiplier": noise_multiplier, "secure": True}
        return noise.add_gaussian(values, stddevs, key, tf.constant(step, tf.int64), **arguments)

    (released,), (actual,) = tf.function(run, jit_compile=jit)()
    return released.numpy(), actual.numpy()


@pytest.mark.parametrize("jit", [False, True])
def test_secure_noise_has_the_standard_deviation_it_states(jit):
    stddev = np.float32(2.5)
    released, actual = _released(np.zeros((200, 300), np.float32), stddev, 4.0, jit=jit)
    assert actual == pytest.approx(2.5 * (1 + 4.0 * 2**-24 * np.sqrt(60_000)), rel=1e-6)
    assert _p_value(released, actual) > FALSE_ALARM
    assert _p_value(released, 0.67 * actual) < 1e-50
    assert _p_value(released, 1.5 * actual) < 1e-50
    # Five standard errors of a normal sample's kurtosis, √(24/n): a false alarm in 1.7 million.
    assert abs(scipy.stats.kurtosis(released.ravel())) < 5 * np.sqrt(24 / released.size)
    next_step, _ = _released(np.zeros((200, 300), np.float32), stddev, step=4)
    others = [released[1:], released[:, 1:], next_step]
    for one, other in zip((released[:-1], released[:, :-1], released), others, strict=True):
        correlation = np.corrcoef(one.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(one.size)


def test_secure_noise_per_coordinate():
    stddev = np.geomspace(1e-20, 1e10, 40).astype(np.float32)
    released, actual = _released(np.zeros((2000, 40), np.float32), stddev)
    assert min(_p_value(released[:, i], actual[i]) for i in range(40)) > FALSE_ALARM


def test_tails_of_64_bit_radii(monkeypatch):
    """Bits of 0, the rarest, end at 9.4 standard deviations in float64 and 6.7 in float32."""
    monkeypatch.setattr(
        tf.random, "stateless_uniform", lambda shape, dtype, **_: tf.zeros(shape, dtype)
    )
    ends = [
        noise.gaussian(KEY, 1, 0, (1,), 1.0, dtype).numpy()[0] for dtype in ("float32", "float64")
    ]
    assert ends == pytest.approx([6.76, 9.49], abs=0.01)


@pytest.mark.parametrize("jit", [False, True])
def test_a_secure_release_is_a_multiple_of_the_grid_whatever_the_sum_was(jit):
    """The low bits of a sum, which float noise shows where it all but cancels, are gone."""
    stddev = np.float32(0.75)
    step_size = 2.0**-1 * 2.0**-24
    sums = np.linspace(-3, 3, 4001).astype(np.float32)  # with bits below the grid
    assert np.any(sums.astype(np.float64) % step_size)
    released, _ = _released(sums.astype(np.float64), stddev, jit=jit)
    assert not np.any(released % step_size)


@pytest.mark.parametrize("secure", [False, True])
def test_the_last_bit_of_a_sum_shows_in_float_noise_alone(secure):
    """A release ends in the sum's own last bit if the noise has a coarser binade."""
    last = 2.0**-26  # of floats in [1/8, 1/4)
    parities = []
    for sum_in_lasts in (13_421_773, 13_421_772):
        value = tf.fill([100_000], np.float32(sum_in_lasts * last))
        (released,), _ = noise.add_gaussian(
            [value], [1.0], KEY, 3, noise_multiplier=1.0, secure=secure
        )
        there = released.numpy()[(released > -0.24) & (released < -0.06)].astype(np.float64)
        assert len(there) > 5000
        parities.append(set(there / last % 2))
    assert parities == ([{0.0}, {0.0}] if secure else [{1.0}, {0.0}])


def test_secure_noise_is_added_exactly_and_apart_from_the_sum():
    """release(x) − release(0) is x rounded to the grid, to the last bit: float64 shows it."""
    rng = np.random.default_rng(0)
    sums = rng.normal(size=5000) * np.geomspace(1e-9, 1e7, 5000)
    with_sum, _ = _released(sums, np.float32(1.5))
    alone, _ = _released(np.zeros(5000), np.float32(1.5))
    np.testing.assert_array_equal(with_sum - alone, np.round(sums * 2.0**24) / 2.0**24)


@pytest.mark.parametrize("noise_multiplier", [0.5, 8.0, 300.0])
def test_the_sensitivity_of_rounded_sums_is_paid_for(noise_multiplier):
    """Neighbours at the worst place for rounding: every coordinate moves by one grid step more."""
    size = 10_000
    stddev = noise_multiplier * np.float32(1.0)  # of a sum with sensitivity 1
    step_size = 2.0 ** np.floor(np.log2(stddev)) * 2.0**-24
    # u has norm 1 and each of its coordinates is rounded up by nearly a whole step.
    low = np.full(size, 0.499) * step_size
    high = low + 1 / np.sqrt(size)
    high += (0.501 - (high / step_size) % 1.0) % 1.0 * step_size  # ends just above a tie
    assert np.linalg.norm(high - low) == pytest.approx(1.0, rel=1e-3)
    moved, actual = _released(high, stddev, noise_multiplier)
    stayed, _ = _released(low, stddev, noise_multiplier)
    ratio = np.linalg.norm(moved - stayed) / float(actual)
    bound = np.linalg.norm(high - low) / (noise_multiplier * np.linalg.norm(high - low))
    assert np.linalg.norm(moved - stayed) > np.linalg.norm(high - low)  # rounding did move it
    assert ratio <= bound * np.linalg.norm(high - low)


def test_secure_noise_where_there_is_nothing_to_hide_or_too_much():
    stddev = np.array([0.0, 1.0, 1.0, 1e-30], np.float32)
    released, _ = _released(np.array([5.0, 3e38, -3e38, 0.0], np.float32), stddev)
    assert released[0] == 0.0
    assert np.all(np.abs(released[1:3]) == 2.0**28)  # cut to a public bound, on both sides
    assert 0 < np.abs(released[3]) < 1e-28


def test_secure_noise_is_the_same_in_graphs_and_differs_between_steps():
    value = np.linspace(-1, 1, 500).astype(np.float32)
    eager = noise.add_gaussian(
        [tf.constant(value)], [1.0], KEY, 3, noise_multiplier=1.0, secure=True
    )[0][0]
    again, other = (
        _released(value, np.float32(1.0))[0],
        _released(value, np.float32(1.0), step=4)[0],
    )
    np.testing.assert_array_equal(eager, again)
    assert np.mean(again == other) < 0.01


# --- keys -----------------------------------------------------------------------------------------


def test_keys_are_fresh_or_come_from_the_seed():
    assert noise.new_key().dtype == np.int64
    assert noise.new_key().shape == (2,)
    assert len({noise.new_key().tobytes() for _ in range(100)}) == 100
    np.testing.assert_array_equal(noise.new_key(5), noise.new_key(np.int32(5)))
    assert len({noise.new_key(s).tobytes() for s in range(-50, 50)}) == 100
    purposes = [None, "", "None", "noise", "examples"]
    assert len({noise.new_key(5, p).tobytes() for p in purposes}) == len(purposes)
    np.testing.assert_array_equal(noise.new_key(5, "examples"), noise.new_key(5, "examples"))


def test_the_noise_of_a_seed_is_that_of_earlier_versions():
    assert noise.new_key(7).tolist() == [1970907750336564409, 7217242409789070811]


@pytest.mark.parametrize("seed", [1.5, "5", True])
def test_seeds_have_to_be_integers(seed):
    with pytest.raises(ValueError, match="seed=.*give an integer, or None"):
        noise.SecretKey(seed)


def test_steps_count_up_in_graphs():
    secret = noise.SecretKey()
    assert int(secret.next_step()) == 1

    @tf.function
    def two_steps():
        return secret.next_step(), secret.next_step()

    assert [int(s) for s in (*two_steps(), *two_steps())] == [2, 3, 4, 5]
    assert secret.releases == 5
    assert secret.next_step().dtype == tf.int64


@pytest.mark.parametrize("jit", [False, True])
def test_steps_count_up_in_loops(jit):
    secret = noise.SecretKey()

    @tf.function(autograph=False, jit_compile=jit)
    def seven_steps():
        return tf.while_loop(
            lambda i, steps: i < 7,
            lambda i, steps: (i + 1, steps.write(i, secret.next_step())),
            (tf.constant(0), tf.TensorArray(tf.int64, 7)),
        )[1].stack()

    assert seven_steps().numpy().tolist() == list(range(1, 8))
    assert seven_steps().numpy().tolist() == list(range(8, 15))
    assert int(secret.next_step()) == secret.releases == 15


def _in_threads(work, threads=4, calls=400):
    """Returns the results of `calls` calls of work() in each of some threads."""
    found, ready = [], threading.Barrier(threads)

    def run():
        ready.wait()
        found.extend([work() for _ in range(calls)])

    started = [threading.Thread(target=run) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return found


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_threads_never_get_the_same_step(mode):
    """A step that two threads shared would be one noise in two releases."""
    secret = noise.SecretKey()
    take = secret.next_step
    if mode != "eager":
        take = tf.function(take, autograph=False, jit_compile=mode == "xla")
        take.get_concrete_function()
    steps = _in_threads(lambda: int(take()))
    assert sorted(steps) == list(range(1, 1601))
    assert secret.releases == 1600


def test_releases_in_threads_have_different_noise():
    optimizer = dp.DPSGD(0.0, noise_multiplier=1.0)
    optimizer.build([keras.Variable(np.zeros(3, np.float32))])
    with recorded_releases(optimizer) as releases:
        _in_threads(lambda: optimizer.apply_private([tf.zeros(3)], 1.0), calls=100)
    drawn = {released.numpy().tobytes() for (released,), _ in releases}
    assert len(drawn) == len(releases) == optimizer.releases == 400


def test_counts_are_handed_over_and_go_on():
    """Reads the plain numbers that version 0.1 wrote into private state files."""
    first, second = noise.SecretKey(), noise.SecretKey()
    for _ in range(3):
        first.next_step()
    words, (key, releases) = _words(first), first.hand_over()
    assert (key, releases) == (words, 3)
    assert type(releases) is int
    second.take_over(key, releases)
    assert (second.releases, int(second.next_step())) == (3, 4)
    assert int(first.next_step()) == 4


def test_renewing_draws_a_key_and_keeps_counting():
    secret, seeded = noise.SecretKey(), noise.SecretKey(3)
    read = tf.function(lambda: secret.key)
    before = read().numpy()
    secret.next_step()
    secret.renew()
    assert not np.any(read().numpy() == before)
    assert int(secret.next_step()) == 2
    seeded.renew()
    np.testing.assert_array_equal(seeded.key, noise.new_key(3))
    assert (secret.reproducible, seeded.reproducible) == (False, True)


# --- secrecy --------------------------------------------------------------------------------------


def _words(secret):
    return [int(word) for word in secret.key.numpy()]


def _shows(data, words):
    """Tells whether bytes hold a word, as 8 bytes of either order or in decimal."""
    forms = [f(w) for w in words for f in (_little, _big, lambda w: str(w).encode())]
    return any(form in data for form in forms)


def _little(word):
    return word.to_bytes(8, "little", signed=True)


def _big(word):
    return word.to_bytes(8, "big", signed=True)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_have_a_key_of_their_own(copied):
    secret = noise.SecretKey()
    assert not set(_words(copied(secret))) & set(_words(secret))
    assert not _shows(pickle.dumps(secret), _words(secret))
    assert _words(copied(noise.SecretKey(3))) == _words(noise.SecretKey(3))
    again = copied(noise.SecretKey(3, "examples"))
    assert _words(again) == _words(noise.SecretKey(3, "examples")) != _words(noise.SecretKey(3))


def test_nothing_is_printed():
    secret = noise.SecretKey()
    assert repr(secret) == str(secret) == "SecretKey(reproducible=False)"
    assert not hasattr(secret, "__dict__")
    with pytest.raises(AttributeError):
        secret.note = 1


class _Holder(tf.Module):
    def __init__(self, attribute):
        super().__init__()
        self.weight = tf.Variable(1.0)
        self.attribute = attribute
        self.nested = {"in a list": [attribute]}


def _checkpoint(folder, attribute):
    holder = _Holder(attribute)
    path = tf.train.Checkpoint(holder=holder).write(str(folder / "checkpoint"))
    names = [name for name, _ in tf.train.list_variables(path)]
    return names, holder, b"".join(f.read_bytes() for f in folder.iterdir())


def test_checkpoints_do_not_hold_the_key(tmp_path):
    secret = noise.SecretKey()
    (tmp_path / "secret").mkdir()
    (tmp_path / "plain").mkdir()
    names, holder, data = _checkpoint(tmp_path / "secret", secret)
    assert not _shows(data, _words(secret))
    assert not any("attribute" in name or "nested" in name for name in names)
    assert [v.dtype for v in holder.variables] == [tf.float32]
    # The same search finds a variable that is held openly.
    _, _, data = _checkpoint(tmp_path / "plain", tf.Variable(secret.key))
    assert _shows(data, _words(secret))


class SGDWithKey(keras.optimizers.SGD):
    def __init__(self, openly=False, **kwargs):
        super().__init__(**kwargs)
        self.secret = noise.SecretKey()
        self.openly = openly

    def build(self, variables):
        super().build(variables)
        if self.openly:
            self.open_copy = self.add_variable((2,), dtype="int64", name="open")


@pytest.mark.parametrize("openly", [False, True])
def test_keras_files_do_not_hold_the_key(tmp_path, openly):
    optimizer = SGDWithKey(openly)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    if openly:
        optimizer.open_copy.assign(optimizer.secret.key)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        data = b"".join(archive.read(name) for name in archive.namelist())
    words = _words(optimizer.secret)
    # Where the key is an open variable, the same search finds it.
    assert _shows(data, words) == openly
    assert not _shows(repr(optimizer.get_config()).encode(), words)
    assert len(optimizer.variables) == (3 if openly else 2)
    tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(tmp_path / "checkpoint"))
    data = b"".join(f.read_bytes() for f in tmp_path.glob("checkpoint*"))
    assert _shows(data, words) == openly


@pytest.mark.extended
def test_replicas_share_key_step_and_noise():
    """Two logical devices need a process of their own."""
    script = """
    import tensorflow as tf
    from tf_adadp import noise

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        inside = noise.SecretKey()
    outside = noise.SecretKey()

    def release(secret):
        step = secret.next_step()
        return step, noise.gaussian(secret.key, step, 0, (3,), 1.0)

    def last_of_three(secret):
        none = tf.constant(0), (tf.zeros([], tf.int64), tf.zeros([3]))
        return tf.while_loop(lambda i, _: i < 3, lambda i, _: (i + 1, release(secret)), none)[1]

    run = tf.function(lambda: strategy.run(lambda: release(inside)))
    loop = tf.function(lambda: strategy.run(lambda: last_of_three(inside)))
    for expected, run in ((1, run), (2, run), (4, run), (7, loop), (8, run), (11, loop)):
        if expected == 4:
            inside.renew()
            assert int(inside.next_step()) == 3
        steps, draws = map(strategy.experimental_local_results, run())
        assert [int(s) for s in steps] == [expected] * 2, steps
        assert draws[0].numpy().tolist() == draws[1].numpy().tolist()
    try:
        tf.function(lambda: strategy.run(lambda: release(outside)))()
    except RuntimeError as error:
        assert "inside `strategy.scope()`" in str(error)
        print("equal, or refused")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines()[-1:] == ["equal, or refused"], result.stderr[-2000:]


@pytest.mark.extended
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_does_not_get_the_parents_noise_key():
    """Runs in a new process: TensorFlow's threads do not survive the fork of a test run."""
    code = """
import os, tf_adadp as dp
optimizer = dp.DPSGD(0.1, noise_multiplier=1.0)
readable, writable = os.pipe()
child = os.fork()
if child == 0:
    refused = []
    for use in (
        lambda: optimizer._noise_key.key,
        lambda: optimizer._noise_key.next_step(),
        lambda: optimizer.charge(dp.PrivacyLedger(), dp.accounting.PoissonSampling(100, 10)),
        lambda: optimizer.example_seed(),
    ):
        try:
            use()
        except RuntimeError as error:
            refused.append("before os.fork" in str(error))
    os.write(writable, repr(refused).encode())
    os._exit(0)
os.close(writable)
print(os.fdopen(readable).read(), optimizer._noise_key.key.shape)
os.waitpid(child, 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[True, True, True, True] (2,)", result.stderr[-2000:]


def test_a_graph_draws_noise_after_the_sums_are_there():
    """Noise is no function of the sums: drawn first, it would be held during the whole pass."""

    @tf.function
    def release(total, key):
        (released,), _ = noise.add_gaussian([total], [1.0], key, 0, noise_multiplier=1.0)
        return released

    total = tf.TensorSpec([7], tf.float32)
    graph = release.get_concrete_function(total, tf.TensorSpec([2], tf.int64)).graph
    total, key = (t.op for t in graph.inputs)
    (reader,) = (op for op in key.outputs[0].consumers() if op.type == "Identity")
    assert list(key.outputs[0].consumers()) == [reader]
    assert total in reader.control_inputs
