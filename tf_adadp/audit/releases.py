"""Many releases of one optimizer from the same state, as scores of an attacker."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from tf_adadp import noise
from tf_adadp.audit.bounds import EpsilonBound, epsilon_lower_bound
from tf_adadp.optimizers import DPOptimizer
from tf_adadp.utils.checks import check_integer, check_number
from tf_adadp.utils.keras_compat import trained_variables

_CANARY_LOSS = 1e30


@dataclasses.dataclass(frozen=True)
class MechanismAudit:
    """Holds scores of releases on two neighbouring datasets, and the bound that they prove.

    Attributes:
        scores, neighbor_scores: float64 [draws], of D (without the canary) and of D' (with it).
        bound: the `EpsilonBound`.

    Example:
        >>> optimizer = dp.DPSGD(1.0, noise_multiplier=2.0)
        >>> optimizer.build([keras.Variable(np.zeros(2, "float32"))])
        >>> canary = [np.array([3.0, 4.0])]
        >>> found = dp.audit.audit_optimizer(optimizer, canary, draws=2000, delta=1e-5, seed=0)
        >>> found.scores.shape
        (2000,)
    """

    scores: np.ndarray
    neighbor_scores: np.ndarray
    bound: EpsilonBound

    @property
    def epsilon(self) -> float:
        """Returns the lower bound on ε."""
        return self.bound.epsilon


def audit_optimizer(
    optimizer: DPOptimizer,
    canary: Sequence[ArrayLike],
    *,
    gradients: Sequence[ArrayLike] | None = None,
    steps: int = 1,
    sampling_probability: float = 1.0,
    expected_lot_size: float = 1.0,
    draws: int = 100_000,
    delta: float,
    confidence: float = 0.95,
    seed: int | None = None,
    jit_compile: bool = False,
) -> MechanismAudit:
    """Bounds the ε of `steps` steps of an optimizer from below, by many runs of them.

    D holds the examples `gradients`, D' the canary besides. Every run starts from the optimizer's
    present state and takes `steps` private steps through `clipping_set`, `sums_beside` and
    `apply_private`, on examples that enter each lot with probability q. The attacker sees every
    release, knows the other examples and the lots' noise, and scores a run by the log-ratio that
    the optimizer's own account gives it:

        Σ_t log(1 − q + q·exp(Λ_t)),   Λ_t = Σ_i [(r_i − d_i)·u_i − u_i²/2] / s_i²

    with r the sum released, d the clipped sum without the canary, u what the canary adds to it, and
    s the noise's standard deviation under the clipping set of that step. This is the strongest
    attack on a step that is the Gaussian mechanism it claims to be. (With q < 1 and `gradients` it
    also knows which of the others were in, so it tests at least what the claim promises.) A
    mechanism that leaks elsewhere, in its noise scale or its choices, wants an attack of its own,
    and so do optimizers that take a lot and no sum (AGD, DPOPT with budgeted directions):
    `draw_scores` and `epsilon_lower_bound`. Releases alone are scored: for what weights and state
    take from the data past them, see `replay_difference`.

    The claim to hold it against: charge a `PrivacyLedger` with
    `optimizer.event(PoissonSampling(N, q·N))` for each step, and read its ε at δ.

    Args:
        optimizer: a built `DPOptimizer` without `seed`. Its state, keys and count of releases are
            as before when the audit ends.
        canary: the gradient of the one example more, a list of arrays [*shape], one per variable.
            The larger, the better: it is clipped. Where losses are released beside the gradient,
            its own is beyond their bound, and those of the others are 0.
        gradients: the examples of both data sets, a list of arrays [B, *shape], or None for none.
        steps: how many steps a run takes.
        sampling_probability: q in (0, 1].
        expected_lot_size: L that sums are divided by.
        draws: runs on each data set.
        delta, confidence: see `epsilon_lower_bound`.
        seed: for tests: an integer that makes the draws reproducible.
        jit_compile: whether XLA compiles the loop; several times faster for small models, and the
            same law under another stream of random numbers.

    Returns:
        A `MechanismAudit`. It is computed from raw gradients and is not private.

    Raises:
        ValueError: an argument is out of range; see `draw_scores`.

    Example:
        >>> optimizer = dp.DPSGD(1.0, noise_multiplier=2.0)
        >>> optimizer.build([keras.Variable(np.zeros(2, "float32"))])
        >>> canary = [np.array([3.0, 4.0])]
        >>> found = dp.audit.audit_optimizer(optimizer, canary, draws=2000, delta=1e-5, seed=0)
        >>> 0 < found.epsilon < accounting.epsilon(2.0, 1.0, 1, 1e-5)
        True
    """
    check_optimizer(optimizer)
    steps = check_integer("steps", steps, at_least=1)
    q = check_number("sampling_probability", sampling_probability, above=0, at_most=1)
    rows = _rows(optimizer, canary, gradients)
    others = rows[0].shape[0] - 1
    losses = tf.one_hot(others, others + 1, on_value=_CANARY_LOSS)
    key = noise.SecretKey(_seed_of(seed, "lots"))

    def run(neighbor):
        score = tf.zeros([], tf.float32)
        for _ in range(steps):
            clipping_set = optimizer.clipping_set()
            present = _coins(key, others + 1, q)
            only_others = tf.concat([present[:others], [0.0]], 0)
            only_canary = tf.one_hot(others, others + 1)
            without = clipping_set.sums_beside(rows, only_others, losses)
            alone = clipping_set.sums_beside(rows, only_canary, losses)
            mask = only_others + neighbor * present * only_canary
            sums = clipping_set.sums_beside(rows, mask, losses)
            with recorded_releases(optimizer) as releases:
                optimizer.apply_private(sums, expected_lot_size)
            ((released, stddevs),) = releases
            divisor = optimizer._divisor(expected_lot_size)
            score += _log_ratio(released, stddevs, without, alone, q, divisor)
        return score

    pair = draw_scores(optimizer, run, draws, seed=seed, jit_compile=jit_compile)
    return MechanismAudit(*pair, epsilon_lower_bound(*pair, delta, confidence))


def draw_scores(
    optimizer: DPOptimizer,
    run: Callable[[tf.Tensor], tf.Tensor],
    draws: int,
    *,
    seed: int | None = None,
    jit_compile: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Runs `run` many times from the same state, inside one `tf.function`.

    Before each run the weights and the optimizer's variables are restored; noise is
    drawn anew under keys that are the audit's own. So a run is whatever the optimizer does when it
    is trained: `apply_private`, `step_on_lot`, several of them, up to a loop that ends when
    something was released.

    Args:
        optimizer: a built `DPOptimizer` without `seed`.
        run: `run(neighbor)`, in graph mode: takes the steps on D where the float32 scalar
            `neighbor` is 0 and on D' where it is 1, and returns a scalar. That may be made of
            everything that the claim says is released, and of both data sets, not of `neighbor`.
        draws: how many runs on each data set, at least 1.
        seed, jit_compile: see `audit_optimizer`.

    Returns:
        (scores, neighbor_scores), float64 [draws] each.

    Raises:
        ValueError: no private optimizer, not built, or made with `seed`: its noise follows the
            step, so that every run would draw the same.

    Example:
        >>> optimizer = dp.DPSGD(1.0, noise_multiplier=2.0)
        >>> optimizer.build([keras.Variable(np.zeros(2, "float32"))])
        >>> def run(neighbor):
        ...     gradient = tf.constant([[3.0, 4.0]]) * tf.cast(neighbor, tf.float32)
        ...     sums = optimizer.clipping_set().clipped_sum([gradient], tf.ones([1]))
        ...     with dp.audit.recorded_releases(optimizer) as releases:
        ...         optimizer.apply_private(sums, 1.0)
        ...     return tf.reduce_sum(releases[0][0])
        ...
        >>> scores, neighbor_scores = dp.audit.draw_scores(optimizer, run, draws=100, seed=0)
        >>> scores.shape
        (100,)
    """
    check_optimizer(optimizer)
    draws = check_integer("draws", draws, at_least=1)
    _, restore = restorable_state(optimizer)

    def loop(neighbor):
        def body(i, scores):
            restore()
            return i + 1, scores.write(i, tf.cast(run(neighbor), tf.float64))

        scores = tf.TensorArray(tf.float64, draws)
        _, scores = tf.while_loop(
            lambda i, _: i < draws, body, (tf.constant(0), scores), parallel_iterations=1
        )
        return scores.stack()

    with own_keys(optimizer, seed):
        try:
            loop = tf.function(loop, autograph=False, jit_compile=jit_compile)
            traced = loop.get_concrete_function(tf.TensorSpec([], tf.float32))
            return tuple(traced(tf.constant(world)).numpy() for world in (0.0, 1.0))
        finally:
            restore()


@contextlib.contextmanager
def recorded_releases(optimizer: DPOptimizer) -> Iterator[list]:
    """Lists what the optimizer releases within it: (released sums over L, noise std over L).

    While a graph is traced the entries are symbolic.

    Example:
        >>> optimizer = dp.DPSGD(1.0, noise_multiplier=2.0)
        >>> optimizer.build([keras.Variable(np.zeros(2, "float32"))])
        >>> sums = optimizer.clipping_set().clipped_sum([tf.zeros([1, 2])], tf.ones([1]))
        >>> with dp.audit.recorded_releases(optimizer) as releases:
        ...     optimizer.apply_private(sums, 1.0)
        ...
        >>> len(releases)
        1
    """
    releases, with_noise = [], optimizer._with_noise

    def record(*args, **kwargs):
        release = with_noise(*args, **kwargs)
        releases.append(tuple(list(part) for part in release))  # the caller may change its lists
        return release

    optimizer._with_noise = record  # on the instance: `del` brings the method back
    try:
        yield releases
    finally:
        del optimizer._with_noise


def restorable_state(
    optimizer: DPOptimizer,
) -> tuple[list[keras.Variable], Callable[[], None]]:
    """Returns the weights and the optimizer's variables, and a function that sets them back."""
    state = list({id(v): v for v in [*optimizer.variables, *trained_variables(optimizer)]}.values())
    start = [tf.identity(v.value) for v in state]

    def restore():
        for variable, value in zip(state, start, strict=True):
            variable.assign(value)

    return state, restore


@contextlib.contextmanager
def own_keys(optimizer: DPOptimizer, seed: int | None) -> Iterator[None]:
    """Gives the audit keys of its own: its releases are neither counted nor ever repeated."""
    keys = {n: k for n, k in vars(optimizer).items() if isinstance(k, noise.SecretKey)}
    for name in keys:
        setattr(optimizer, name, noise.SecretKey(_seed_of(seed, name)))
    try:
        yield
    finally:
        for name, key in keys.items():
            setattr(optimizer, name, key)


def _seed_of(seed, name):
    """Returns a seed for each stream of draws, all different; None for None."""
    if seed is None:
        return None
    digest = hashlib.sha256(f"{int(seed)} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def check_optimizer(optimizer: DPOptimizer) -> None:
    """Refuses what cannot be audited: no private optimizer, not built, or seeded."""
    if not isinstance(optimizer, DPOptimizer):
        raise ValueError(f"optimizer={optimizer!r}: give one of tf_adadp's optimizers.")
    if not optimizer.built:
        raise ValueError(
            f"This {type(optimizer).__name__} is not built: call `optimizer.build(variables)`."
        )
    if optimizer.seed is not None:
        raise ValueError(
            f"seed={optimizer.seed}: the noise of a seeded optimizer follows its step, so every "
            "run would draw the same. Make it without seed; the audit has one of its own."
        )


def examples(optimizer: DPOptimizer, gradients: Sequence[ArrayLike]) -> list[tf.Tensor]:
    """Returns gradients of examples as float32 [B, *shape], checked against the variables.

    Raises:
        ValueError: other shapes.
    """
    shapes = [tuple(v.shape) for v in trained_variables(optimizer)]
    rows = [np.asarray(g, np.float32) for g in gradients]
    if [g.shape[1:] for g in rows] != shapes or len({len(g) for g in rows}) > 1:
        raise ValueError(
            f"gradients of shapes {[g.shape for g in rows]} for variables of shapes {shapes}: give "
            "the gradients of B examples, with a first axis for examples."
        )
    return [tf.constant(g) for g in rows]


def _rows(optimizer, canary, gradients):
    """Returns the examples and, last, the canary: a list of float32 [B + 1, *shape]."""
    shapes = [tuple(v.shape) for v in trained_variables(optimizer)]
    canary = [np.asarray(g, np.float32) for g in canary]
    if [g.shape for g in canary] != shapes:
        raise ValueError(
            f"canary of shapes {[g.shape for g in canary]} for variables of shapes {shapes}: give "
            "the gradient of one example."
        )
    if gradients is None:
        gradients = [np.zeros((0, *shape)) for shape in shapes]
    others = examples(optimizer, gradients)
    return [tf.concat([g, c[None]], 0) for g, c in zip(others, canary, strict=True)]


def _coins(key, count, q):
    """Draws coins, float32 [count], 1 with probability q."""
    if q == 1:
        return tf.ones([count])
    seed = noise.stream(key.key, key.next_step(), 0)
    uniform = tf.random.stateless_uniform([count], seed, dtype=tf.float64, alg="philox")
    return tf.cast(uniform < q, tf.float32)


def _log_ratio(released, stddevs, without, alone, q, divisor):
    """Returns log p'(release)/p(release) of one step by its claimed noise, a float32 scalar."""
    terms = []
    # Not strict: prior="raw" has a second sum, which is not part of the release.
    for r, s, d, u in zip(released, stddevs, without, alone, strict=False):
        u, noisy = u / divisor / s, (r - d / divisor) / s
        terms.append(tf.reduce_sum(noisy * u - tf.square(u) / 2))
    llr = tf.add_n(terms)
    return llr if q == 1 else tf.reduce_logsumexp([np.log1p(-q), np.log(q) + llr])
