"""Runs one training that `cases` describes, and checks what must hold of it.

Either a clear error comes before anything is released, or all lots train and

1. the ledger counts the steps of the optimizer, by the event of the law, worked out here by hand;
2. all weights are finite, and no state but the trained one has changed;
3. on a lot of its own, one example more (ordinary, huge, infinite or NaN) moves the engine's
   un-noised sum by at most (1 + 1e-5)/σ* in the metric of the noise;
4. the training step is traced once, or once per number of lots in an execution;
5. what padding rows hold, and over how many physical batches a lot is spread, changes nothing.
"""

import gc
import math
import time
import warnings

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

import tf_adadp as dp
from tf_adadp.training.preparation import physical_batch_size
from verification.fuzzing import build
from verification.fuzzing.training import Training

TOLERANCE = 1e-5  # of the sensitivity, relative
_CLEAR = (ValueError, TypeError, RuntimeError)
_ROWS = 3  # of the lot that sensitivity is measured on


class Broken(AssertionError):
    """The package did what it must not do."""


class CountedModel(dp.DPModel):
    """Counts how often its step is traced."""

    traces = 0

    def train_step(self, lot):
        self.traces += 1
        return super().train_step(lot)


def run(case, lots=10):
    """Runs a case. Returns a dict with `outcome` and what belongs to it:

    "trained", with `engine`, `steps` and how far one record `moved` a sum;
    "refused", with `error`, `message` and `stage` (wrap, optimizer, compile or fit);
    "invalid", where Keras could not make the plain model; "failed", with `message`.
    """
    started = time.process_time()
    gc.collect()
    keras.utils.clear_session()
    keras.utils.set_random_seed(case["seed"])
    with warnings.catch_warnings(), build.precision(case["policy"]):
        warnings.simplefilter("ignore")
        try:
            result = _run(case, lots)
        except Broken as broken:
            result = {"outcome": "failed", "message": str(broken)}
    return {**result, "seconds": round(time.process_time() - started, 1)}


def _run(case, lots):
    rng = np.random.default_rng(case["seed"])
    try:
        plain = build.plain_model(case)
        x, y, weights = build.data(case, case["rows"], rng)
        if case["seed"] % 2:  # the other half of the subclassed models is built by `fit`
            plain(keras.tree.map_structure(lambda a: tf.constant(a[:1]), x))
    except Exception as error:
        return {"outcome": "invalid", **_described(error)}
    x = build.poisoned(x, case["poison"], rng)
    training = Training(case, plain, (x, y, weights), lots, rng)
    case = training.case
    before = [np.array(v) for v in plain.variables]
    private, stage = None, "wrap"
    try:
        private = CountedModel(plain, **training.wrap)
        stage = "optimizer"
        optimizer = training.optimizer()
        stage = "compile"
        private.compile(optimizer, **training.compile)
        training.compiled(plain)
        stage = "fit"
        training.fit(private)
    except Exception as error:
        _check_refusal(error, stage, plain, private, before)
        return {"outcome": "refused", "stage": stage, **_described(error)}
    _check_ledger(case, training, private)
    _check_weights(case, plain, private, before)
    _check_traces(case, private)
    if len(before) == len(plain.variables):
        for variable, value in zip(plain.variables, before, strict=True):
            variable.assign(value)  # noise may have driven them where all gradients vanish
    moved, steps = None, private.ledger.steps
    if steps and not isinstance(private.ledger.entries[0].event, dp_accounting.NonPrivateDpEvent):
        moved = _check_sums(case, training, private)
    engine = private.session.prepared.plan.engine
    return {"outcome": "trained", "engine": engine, "steps": steps, "moved": moved}


def _described(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return {"error": type(error).__name__, "message": (lines or [""])[0][:160]}


def _check_refusal(error, stage, plain, private, before):
    name, text = type(error).__name__, str(error)
    # Keras's own, where `loss` names an output that there is none of.
    names_loss = isinstance(error, KeyError) and "in the `loss` argument" in text
    clear = isinstance(error, _CLEAR) and not isinstance(error, tf.errors.OpError)
    if not clear and not names_loss:
        raise Broken(f"unclear error at {stage}: {name}: {text[:300]}") from error
    if len(text) < 15:
        raise Broken(f"an error without a message at {stage}: {name}: {text!r}") from error
    if private is None:
        return
    optimizer = getattr(private, "optimizer", None)
    if optimizer is not None and int(optimizer.iterations) > 0:
        raise Broken(
            f"error after {int(optimizer.iterations)} steps: {name}: {text[:300]}"
        ) from error
    if private.ledger.steps and not private.ledger.unknown_reasons:
        raise Broken(f"error after a charge: {name}: {text[:300]}") from error
    if len(before) == len(plain.variables) and not _equal(before, plain.variables):
        raise Broken(f"error, and weights changed: {name}: {text[:300]}") from error


def _equal(before, variables):
    return all(
        np.array_equal(np.float64(a), np.float64(v), equal_nan=True)
        for a, v in zip(before, variables, strict=True)
    )


def _check_ledger(case, training, private):
    optimizer, ledger = private.optimizer, private.ledger
    steps, wanted = int(optimizer.iterations), training.steps
    if ledger.steps != steps or ledger.unknown_reasons:
        raise Broken(f"{steps} steps, {ledger.steps} charged {ledger.unknown_reasons}")
    if optimizer.uncharged_releases or optimizer._noise_key.releases != steps:
        raise Broken(f"{optimizer._noise_key.releases} releases in {steps} steps")
    if steps != wanted and not (case["optimizer"] == "AGD" and 0 < steps < wanted):
        raise Broken(f"{steps} steps instead of {wanted}")
    if case["optimizer"] == "AGD" or not steps:
        return
    event = _event(case, training, optimizer)
    charged = {}
    for entry in ledger.entries:
        if entry.event != dp_accounting.NoOpDpEvent():
            charged[entry.event] = charged.get(entry.event, 0) + entry.count
    if list(charged.values()) != [training.charges] or not _alike(*charged, event):
        raise Broken(f"charged {charged}, expected {training.charges} × {event}")
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        if private.epsilon(1e-5) != math.inf:
            raise Broken(f"ε = {private.epsilon(1e-5)} for {event}")
    # At so small a δ that rare lots and much noise alone do not meet it.
    elif case["lots"] != "truncated" and not 0 < private.epsilon(1e-15) < math.inf:
        raise Broken(f"ε = {private.epsilon(1e-15)} at δ = 1e-15 for {event}")


def _alike(event, other):
    """Tells whether two events are of one kind, with the same numbers but for rounding."""
    if type(event) is not type(other):
        return False
    if isinstance(event, dp_accounting.DpEvent):
        return all(
            _alike(getattr(event, n), getattr(other, n)) for n in getattr(event, "__slots__", ())
        )
    return event == other or math.isclose(event, other, rel_tol=1e-12)


def _event(case, training, optimizer):
    """The event of a step, or of a pass, by hand."""
    sigma = optimizer.noise_multiplier
    arguments = case["arguments"]
    not_private = arguments.get("prior") == "raw" or arguments.get("variant") == "printed"
    if sigma == 0 or not_private:
        return dp_accounting.NonPrivateDpEvent()
    if arguments.get("directions") == "budgeted":
        sigma = (sigma**-2 + arguments["direction_noise_multiplier"] ** -2) ** -0.5
    kind, rows, size = case["lots"], case["rows"], training.size
    replaces = kind in ("fixed", "shuffled")
    if replaces or arguments.get("microbatch_size", 1) > 1:
        sigma /= 2
    if kind == "users":
        people = -(-rows // 3)
        return _poisson(case["fraction"] * people / people, sigma / 2)  # two records of a user
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    if kind == "shuffled" or (replaces and size == rows):
        return gaussian
    if kind == "fixed":
        return dp_accounting.SampledWithoutReplacementDpEvent(rows, size, gaussian)
    if kind == "truncated":
        return dp_accounting.TruncatedSubsampledGaussianDpEvent(
            rows, size / rows, training.max_size, sigma
        )
    return _poisson(size / rows, sigma)


def _poisson(probability, sigma):
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    if probability == 1:
        return gaussian
    return dp_accounting.PoissonSampledDpEvent(probability, gaussian)


def _check_weights(case, plain, private, before):
    # Keras's own Nadam divides by 1 − β₂ᵗ, which is 0 in bfloat16.
    divides_by_zero = case["optimizer"] == "Nadam" and case["policy"] == "bfloat16"
    for variable in (*plain.variables, *private.optimizer.variables):
        if not divides_by_zero and not np.all(np.isfinite(np.float64(variable))):
            raise Broken(f"{variable.path} ({variable.dtype}) is not finite after training")
    if len(before) == len(plain.variables):
        for variable, old in zip(plain.variables, before, strict=True):
            trained = any(variable is v for v in plain.trainable_variables)
            if not trained and not _equal([old], [variable]):
                raise Broken(f"{variable.path} is not trained, and was changed")


def _check_traces(case, private):
    if not case["eager"] and private.traces > case["steps_per_execution"]:
        raise Broken(f"the step was traced {private.traces} times")


def _check_sums(case, training, private):
    """The sensitivity in units of 1/σ*, and that padding and physical batches do not matter."""
    measure = _Sums(case, training, private)
    ordinary = measure.sums(())
    largest = 0.0
    for place, kind in enumerate(measure.strangers):
        moved = measure.distance(measure.sums((place,)), ordinary)
        largest = max(largest, moved)
        bound = measure.bound * (1 + TOLERANCE)
        if not moved <= bound:
            raise Broken(f"one {kind} example moved the sum by {moved:.8g}/σ*, allowed {bound:.8g}")
    if not measure.deterministic:
        return largest
    for what, other in (("padding", measure.clean()), ("physical batches", measure.spread())):
        apart = measure.relative(other, ordinary)
        if not apart <= measure.rounding:
            raise Broken(f"other {what} changed the sum by {apart:.3g} of it")
    return largest


class _Sums:
    """The un-noised sums of the trained engine on small lots of one shape."""

    def __init__(self, case, training, private):
        optimizer, engine = private.optimizer, private.session.prepared.engine
        rng = np.random.default_rng(case["seed"] + 1)
        kinds = {branch["input"] for branch in case["model"]["branches"]}
        floats = case["x_dtype"] != "uint8" and kinds & {"vector", "image", "sequence"}
        self.strangers = ["ordinary", *(["huge", "larger", "nan", "inf"] if floats else [])]
        calm = {**case, "weights": case["weights"] and "plain", "poison": None}
        if case["weights"] == "class":
            calm["weights"] = "plain"
        x, y, w = build.data(calm, _ROWS + len(self.strangers), rng)
        self._dirty = _cast(training.element_spec, (_strange(x, self.strangers), y, _heavy(w)))
        self._zeroed = keras.tree.map_structure(_only_first, self._dirty)
        size = self._batch = physical_batch_size(private, engine, training.expected_size)
        flat = [a for a in tf.nest.flatten(self._dirty) if a is not None]
        signature = [tf.TensorSpec((None, size, *a.shape[1:]), a.dtype) for a in flat]
        structure = self._dirty
        expected, self.deterministic = tf.constant(training.expected_size, tf.float32), True
        random = engine.example_loss.num_seed_generators > 0
        slots = optimizer.microbatch_size > 1
        self.deterministic = not random and not slots
        self.bound = 2.0 if slots else 1.0
        low = case["policy"] not in ("float32", "float64", "floatx_float64")
        low |= "half_dense" in str(case["model"])
        self.rounding = 0.1 if low else 1e-3
        seed = tf.constant([3, 5], tf.int64)
        sigma = optimizer.noise_multiplier or 1.0

        @tf.function(
            input_signature=[*signature, tf.TensorSpec((None, size), tf.float32)], autograph=False
        )
        def sums(*leaves):
            *leaves, mask = leaves
            rows = _packed(structure, leaves)
            found, _ = optimizer._clipped_sum(
                engine, (rows, mask), optimizer.clipping_set(), seed, expected
            )
            return found

        self._sums = sums
        stddevs = optimizer.clipping_set().noise_stddev(sigma, len(private.trainable_variables))
        self._stddevs = [np.asarray(s, np.float64) for s in stddevs]
        self._sigma = sigma

    def sums(self, strangers, rows=None, places=None, batches=None):
        """The sums over the ordinary rows and the strangers given; all others are masked."""
        rows = self._dirty if rows is None else rows
        count = _ROWS + len(self.strangers)
        mask = np.zeros(count, np.float32)
        mask[:_ROWS] = 1
        for place in strangers:
            mask[_ROWS + place] = 1
        places = np.arange(count) if places is None else places
        batches = batches or -(-count // self._batch)
        total = batches * self._batch

        def laid_out(a):
            out = np.zeros((total, *a.shape[1:]), a.dtype)
            out[places] = a
            return tf.constant(out.reshape(batches, self._batch, *a.shape[1:]))

        flat = [a for a in tf.nest.flatten(rows) if a is not None]
        return [np.asarray(s, np.float64) for s in self._sums(*map(laid_out, (*flat, mask)))]

    def clean(self):
        """The sums with zeros in the masked rows."""
        return self.sums((), self._zeroed)

    def spread(self):
        """The sums with rows in reverse order and gaps between them, over more batches."""
        count = _ROWS + len(self.strangers)
        batches = -(-2 * count // self._batch) + 1
        return self.sums((), places=2 * np.arange(count)[::-1], batches=batches)

    def distance(self, one, other):
        """‖(one − other)/s‖₂·σ*; infinite where a coordinate without noise differs."""
        total = 0.0
        for a, b, s in zip(one, other, self._stddevs, strict=False):
            u, s = a - b, np.broadcast_to(s, a.shape)
            if np.any(u[s == 0]) or not np.all(np.isfinite(u)):
                return math.inf
            total += np.sum((u[s > 0] / s[s > 0]) ** 2)
        return math.sqrt(total) * self._sigma

    def relative(self, one, other):
        norm = math.sqrt(sum(float(np.sum(b**2)) for b in other))
        least = 1e-4 * max(float(np.max(s, initial=0)) for s in self._stddevs) / self._sigma
        apart = math.sqrt(sum(float(np.sum((a - b) ** 2)) for a, b in zip(one, other, strict=True)))
        return apart / max(norm, least, 1e-30)


def _packed(structure, leaves):
    leaves = iter(leaves)
    flat = [None if a is None else next(leaves) for a in tf.nest.flatten(structure)]
    return tf.nest.pack_sequence_as(structure, flat)


def _cast(spec, values):
    values = keras.tree.lists_to_tuples(values)

    def one(s, a):
        if s is None or a is None:
            return None
        return np.asarray(a).astype(s.dtype.as_numpy_dtype)

    return tf.nest.map_structure(one, spec, values)


def _strange(x, strangers):
    values = {"huge": 1e4, "larger": 1e20, "nan": np.nan, "inf": np.inf}

    def one(a):
        if a.dtype.kind != "f":
            return a
        a = a.astype(np.float64)
        for place, kind in enumerate(strangers):
            if kind in values:
                a[_ROWS + place] *= values[kind]
        return a

    return keras.tree.map_structure(one, x)


def _heavy(weights):
    if weights is None:
        return None
    weights = weights.astype(np.float64)
    weights[_ROWS] = 1e6
    return weights


def _only_first(a):
    if a is None:
        return None
    a = a.copy()
    a[_ROWS:] = 0
    return a
