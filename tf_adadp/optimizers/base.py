"""What every private optimizer shares: one noisy release per lot, then Keras's own update rule."""

import contextlib
import contextvars
import inspect
import numbers

import keras
import numpy as np
import tensorflow as tf

from tf_adadp import __version__, clipping, noise
from tf_adadp.charging.charges import Charges
from tf_adadp.distribution import replicas
from tf_adadp.utils.checks import check_bool, check_integer, check_number

# What classes could override in 0.1: a charge that they add there would be lost.
_NO_HOOKS = frozenset(("record", "expiring", "cover_metrics"))
_RELEASING = contextvars.ContextVar("tf_adadp_releasing", default=False)
# The set of the `step_on_lot` that runs, in the thread of its replica.
_SET_OF_STEP = contextvars.ContextVar("set of a step", default=None)


class DPOptimizer:
    """Mixin that makes a Keras optimizer private: `class DPSGD(DPOptimizer, keras.optimizers.SGD)`.

    One step releases one noisy sum, and everything after it is post-processing:

        g̃ = (Σ_x clip_K(∇ℓ(θ, x)) + N(0, diag(s²))) / L + a
        θ, optimizer state ← Keras's update rule(g̃ + gradient of the weight regularisers)

    K is a set (see `tf_adadp.clipping`) that depends on past releases only, a its centre (0 but for
    AdaCliP), s the noise that fits K at multiplier σ*, L the EXPECTED lot size, never the realised.

    Guarantee: with lots that hold each record independently with probability q (Poisson sampling),
    neighbours by adding or removing one record, and Σ v²/s² ≤ 1/σ*² for all v in K, one step costs
    at most one Poisson-sampled Gaussian mechanism of multiplier σ* (generalised Lemma 1 of Xu et
    al., "An Adaptive and Fast Convergent Approach to Differentially Private Deep Learning").
    `event(law)` describes it to the accountant. With microbatch_size > 1, or under replace-one
    neighbours, the multiplier is σ*/2; for users with up to k records in a lot it is σ*/k. Each
    law's class states its own.

    A private optimizer refuses raw gradients: `apply`, `apply_gradients` and `update_step` raise
    outside `apply_private`, before any weight changes. What sets the privacy is read-only: every
    argument x that a class or mixin names in its `__init__` beside those of its Keras optimizer, as
    the attributes x and _x. For another noise_multiplier make another optimizer and compile again.

    Args:
        learning_rate: a number or a Keras schedule; None: the default of the Keras optimizer.
        noise_multiplier: σ* > 0, noise std over sensitivity. It sets the privacy, so there is no
            default: an optimizer made with None has a configuration, but raises a ValueError when
            it is compiled, charged or asked to release. 0 only with `allow_no_noise=True`, charged
            ε = ∞.
        l2_norm_clip: C > 0, or a dict {variable path prefix: bound} for one ball per prefix; the
            longest prefix wins and every trainable variable must match one.
        automatic_clipping: None, or γ > 0: every gradient is divided by its norm plus γ and scaled
            to l2_norm_clip, small ones up as well (AUTO-S, Bu et al. 2022), see `AutoSGD`. Not
            for boxes, which know no norm.
        microbatch_size: k ≥ 1; k > 1 clips sums over slots of k examples in expectation and
            doubles the sensitivity.
        augmentation_multiplicity: K ≥ 1; with K > 1 the gradient of an example is the mean over K
            draws of the model's random layers (`RandomTranslation`, dropout, …), taken before it
            is clipped, so the sensitivity is that of K = 1 (De et al. 2022, "Unlocking
            high-accuracy differentially private image classification through scale"). A step costs
            about K times as much.
        seed: for tests only: makes noise, sampling and dropout reproducible. Whoever knows it can
            subtract the noise; every report then says "reproducible noise".
        allow_no_noise: see noise_multiplier.
        secure_noise: whether sums and noise are rounded to one grid before they are added, a
            defence against attacks on floating-point bits, at three to four times the cost of the
            noise; `tf_adadp.noise` says what it defends against and what not.
        **keras_arguments: those of the Keras optimizer (weight_decay, use_ema, …).
            `gradient_accumulation_steps` and `loss_scale_factor` are refused.

    Raises:
        ValueError: on an argument that is missing, of the wrong type or out of range.
    """

    _read_only = frozenset()  # set at the end of this module and for every subclass
    moves_every_step = True  # False where a step may leave the weights as they were
    distributable = True  # False where branches hold what replicas do together
    # Whether a class that defines its own event, charge or step counts metrics released from the
    # same lot: its event covers them, and its step shows every example to `on_batch` once. Not
    # inherited.
    covers_metrics = True
    event_varies = False  # True where the coming step's event depends on what was released
    # Whether a step is one noisy sum and nothing else, so that K steps on one lot are one Gaussian
    # mechanism of multiplier σ*/√K.
    releases_one_sum = True

    def __init__(
        self,
        learning_rate=None,
        *,
        noise_multiplier=None,
        l2_norm_clip=1.0,
        automatic_clipping=None,
        microbatch_size=1,
        augmentation_multiplicity=1,
        seed=None,
        allow_no_noise=False,
        secure_noise=False,
        **keras_arguments,
    ):
        _check_noise_multiplier(noise_multiplier, allow_no_noise)
        whole = "an integer of at least 1"
        microbatch_size = check_integer(
            "microbatch_size",
            microbatch_size,
            f"{whole}; 1 clips every example by itself and adds the least noise",
            at_least=1,
        )
        augmentation_multiplicity = check_integer(
            "augmentation_multiplicity", augmentation_multiplicity, whole, at_least=1
        )
        if seed is not None:
            seed = check_integer("seed", seed, "an integer (tests only) or None")
        for name, way_out in (
            (
                "gradient_accumulation_steps",
                "give `fit` a larger batch_size: a lot is summed over "
                "physical batches in the memory of one, and gets its noise once",
            ),
            (
                "loss_scale_factor",
                "nothing: under mixed_float16 the loss is scaled by a fixed "
                "factor that is undone before clipping",
            ),
        ):
            if keras_arguments.get(name) is not None:
                raise ValueError(
                    f"{name}={keras_arguments[name]!r} is not private in {type(self).__name__}: it "
                    f"would act on the noise. Instead, {way_out}."
                )
        if isinstance(learning_rate, (numbers.Real, np.bool_)):
            learning_rate = check_number(  # Keras takes Python's own floats alone
                "learning_rate", learning_rate, "a finite number or a Keras schedule"
            )
        if learning_rate is not None:
            keras_arguments["learning_rate"] = learning_rate
        super().__init__(**keras_arguments)
        self.noise_multiplier = None if noise_multiplier is None else float(noise_multiplier)
        self.microbatch_size = microbatch_size
        self.augmentation_multiplicity = augmentation_multiplicity
        self.seed = seed
        self.allow_no_noise = bool(allow_no_noise)
        self.secure_noise = check_bool("secure_noise", secure_noise)
        clip = self._check_clip(l2_norm_clip)
        # No dict, which could be changed in place.
        self._l2_norm_clip = tuple(clip.items()) if isinstance(clip, dict) else clip
        if automatic_clipping is not None:
            automatic_clipping = check_number(
                "automatic_clipping", automatic_clipping, "None or γ, a number above 0", above=0
            )
            clipping.L2Ball(1.0, gamma=automatic_clipping)  # checks the range
        self.automatic_clipping = automatic_clipping
        self._noise_key = noise.SecretKey(self.seed)
        self._example_key = noise.SecretKey(self.seed, "examples")
        self.charges = Charges(self, self._noise_key)
        self._build_failed = False

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[: cls.__mro__.index(DPOptimizer)]:
            if not issubclass(base, DPOptimizer) and issubclass(base, keras.optimizers.Optimizer):
                raise TypeError(
                    f"class {cls.__name__}: {base.__name__} comes before DPOptimizer, and would "
                    f"take raw gradients. Write class {cls.__name__}(DPOptimizer, {base.__name__})."
                )
        for name in _NO_HOOKS.intersection(vars(cls)):
            raise TypeError(
                f"class {cls.__name__} defines {name}, which nothing calls: charges are made by "
                "optimizer.charges. For another price of a step override `event`."
            )
        cls._read_only = _read_only_names(cls)

    def _require_noise_multiplier(self):
        """Raises a ValueError for an optimizer that was made without noise_multiplier."""
        if self.noise_multiplier is None:
            name = type(self).__name__
            raise ValueError(
                f"{name} was made without noise_multiplier, which sets the privacy. Make it as "
                f"{name}(noise_multiplier=σ); for a budget, σ = "
                "tf_adadp.accounting.calibrate_noise_multiplier(target_epsilon=2.0, delta=1e-5, "
                "sampling_probability=256 / 60000, steps=2000)."
            )

    @property
    def l2_norm_clip(self):
        """C, or a copy of the dict of bounds."""
        clip = self._l2_norm_clip
        return clip if isinstance(clip, float) else dict(clip)

    @property
    def ledger_origin(self) -> str:
        """The origin in the entries of a ledger, but for released metrics."""
        return type(self).__name__

    def __setattr__(self, name, value):
        if name in self._read_only and hasattr(self, name):
            raise AttributeError(
                f"{name} of a {type(self).__name__} is read-only: graphs that release with "
                f"{getattr(self, name)!r} may be traced already. Make a new optimizer with "
                f"{name.removeprefix('_')}={value!r} and compile again."
            )
        super().__setattr__(name, value)

    def __delattr__(self, name):
        if name in self._read_only:
            raise AttributeError(
                f"{name} of a {type(self).__name__} is read-only: what it releases and is charged "
                "for follows from it. Make a new optimizer and compile again."
            )
        super().__delattr__(name)

    def _check_clip(self, l2_norm_clip):
        """The validated l2_norm_clip: a float, or a dict of floats where the method allows it."""
        wanted = "a finite number above 0, or a dict {variable path prefix: such a number}"
        if not isinstance(l2_norm_clip, dict) or not l2_norm_clip:
            return check_number("l2_norm_clip", l2_norm_clip, wanted, above=0)
        return {
            str(prefix): check_number(f"l2_norm_clip[{prefix!r}]", bound, wanted, above=0)
            for prefix, bound in l2_norm_clip.items()
        }

    def build(self, variables):
        """Creates the state of the update rule and of the clipping set."""
        if self.built:
            known = self._trainable_variables
            if len(known) != len(variables) or any(
                a is not b for a, b in zip(known, variables, strict=True)
            ):
                raise ValueError(
                    f"This {type(self).__name__} was built for other variables (another model, or "
                    "other trainable layers), and would go on moving those. Make a new optimizer."
                )
            return
        if self._build_failed:
            raise ValueError(
                f"An earlier build of this {type(self).__name__} failed, and left it half made. "
                "Make a new optimizer."
            )
        self._build_failed = True
        clipping.bounds_for([_path(v) for v in variables], self.l2_norm_clip)  # checks the prefixes
        super().build(variables)
        self.built = False
        self._build_private(variables)
        self.built = True
        self._build_failed = False
        self.charges.attach(variables)

    def _add_slots(self, name, variables):
        """State of the form of the variables: float32, zeros."""
        return [self._add_state(tuple(v.shape), f"{name}_{i}") for i, v in enumerate(variables)]

    def _add_state(self, shape, name, dtype="float32"):
        """A variable of released state, zeros; where there are several replicas, alike on all."""
        return self.add_variable(
            shape, initializer="zeros", dtype=dtype, aggregation="only_first_replica", name=name
        )

    def _build_private(self, variables):
        """Hook: creates what `clipping_set` depends on. Called once, after Keras's own state."""

    def clipping_set(self):
        """The set K of this step, a `tf_adadp.clipping.ClippingSet` of released state only."""
        bounds = clipping.bounds_for(
            [_path(v) for v in self._trainable_variables], self.l2_norm_clip
        )
        if isinstance(bounds, float):
            return clipping.L2Ball(bounds, gamma=self.automatic_clipping)
        return clipping.LayerBalls(*bounds, gamma=self.automatic_clipping)

    def event(self, law):
        """The privacy event of one step on a lot drawn by `law` (see `tf_adadp.accounting`).

        Of a whole pass, where the law pays by the pass; `law.charges` spreads it over steps.
        """
        self._require_noise_multiplier()
        return self._sum_event(law, self.noise_multiplier)

    def _sum_event(self, law, noise_multiplier):
        """The event of one noisy clipped sum, and of the metrics that are released beside it."""
        microbatched = self.microbatch_size > 1
        sigma_m = self.metrics_noise_multiplier
        if sigma_m is None:
            return law.event(noise_multiplier, microbatched=microbatched)
        return law.event_with_metrics(noise_multiplier, sigma_m, microbatched=microbatched)

    @property
    def metrics_noise_multiplier(self):
        """σ_m of metrics that every step releases from its lot and `event` covers; None: none."""
        return self.charges.metrics_noise_multiplier

    def charge(
        self,
        ledger,
        law,
        steps=1,
        *,
        position=0,
        reproducible_sampling=False,
        releases_per_lot=1,
    ):
        """Writes `steps` releases on lots drawn by `law` into a ledger, before they are made.

        `DPModel.fit` and `tf_adadp.private_step` do this by themselves; custom loops call it ahead
        of `apply_private`. The weights remember the ledger: a DPModel that has them, now or later,
        reports all that is in it, too.

        One charge pays for one release from one lot. K releases from the same lot share its
        sampling: together they are one Gaussian mechanism of multiplier σ*/√K on that lot (Dong,
        Roth and Su, arXiv:1905.02383, Corollary 3.3), which costs more than K releases from K
        lots. `releases_per_lot=K` charges that.

        Args:
            ledger: the `PrivacyLedger` that is charged.
            law: the sampling law of the lots, `lots.law`.
            steps: the number of lots.
            position: where lots are paid for by the pass (`ShuffledLots`), how many of one
                iteration over them were charged before; 0 charges a new pass, and so does any
                position that this optimizer's last charge of that ledger did not end at.
            reproducible_sampling: whether the lots are seeded.
            releases_per_lot: K ≥ 1, the number of releases to be made from each of these lots.

        Raises:
            ValueError: releases_per_lot > 1 and a step of this optimizer is not one noisy sum.
        """
        self.charges.charge(
            ledger,
            law,
            steps,
            position=position,
            reproducible_sampling=reproducible_sampling,
            releases_per_lot=releases_per_lot,
        )

    def before_charge(self, ledger, law, steps):
        """Hook: a charge of `steps` releases comes next. Raises where a budget has no room."""

    @contextlib.contextmanager
    def charged(self, ledger, law, steps, *, position=0, reproducible_sampling=False):
        """Charges `steps` releases, to be made inside the `with` block.

        A charge whose release was not made, after an error, stays in the ledger and expires here:
        it does not pay for a later release. Releases beyond `steps` stay uncharged.
        """
        self.charge(
            ledger, law, steps, position=position, reproducible_sampling=reproducible_sampling
        )
        with self.charges.expiring(steps):
            yield

    def example_seed(self):
        """A fresh int64 [2] seed for the examples' own randomness: dropout, microbatch slots.

        From a secret key: whoever knows the slots, or could replay the masks, would know how one
        record moves the contributions of the others.
        """
        step = self._example_key.next_step()
        if self.seed is not None:
            step = tf.cast(self.iterations.value, tf.int64)
        seed = noise.stream(self._example_key.key, step, 0)
        # The low half of the first word is for the physical batches of a replica's share.
        return seed + tf.stack([replicas.replica_number() * 2**32, tf.zeros([], tf.int64)])

    @property
    def kept_on_one_device(self):
        """The name of what has branches that several replicas cannot take together; or None."""
        if not self.distributable:
            return type(self).__name__
        if getattr(self, "ema_overwrite_frequency", None) is not None and self.use_ema:
            return f"ema_overwrite_frequency={self.ema_overwrite_frequency}"
        return None

    @property
    def steps_taken(self):
        """`iterations` as an int (outside of graphs), also where it is on several devices."""
        return int(self.iterations.numpy())

    @property
    def releases(self):
        """The number of releases that this process made, charged or not."""
        return self.charges.releases

    @property
    def uncharged_releases(self):
        """The number of releases that this process made and no `charge` paid for."""
        return self.charges.uncharged

    def renew_keys(self, agree=None):
        """New keys for noise and examples' randomness; see `noise.SecretKey.renew`."""
        for value in vars(self).values():
            if isinstance(value, noise.SecretKey):
                value.renew(agree)

    def bind(self, model, loss):
        """Hook: the plain model and its compiled loss, once, before `step_on_lot` is traced."""

    def begin(self, law, lots, steps_per_execution):
        """Hook: a run on these lots begins (None where one batch is given). Raises what it refuses.

        Called before anything is trained; `law` is what the run will be charged by.
        """

    def can_continue(self, law):
        """Hook: whether a budget of the optimizer's own has room for another step.

        From released state only. Asked after every execution; training stops where it is False.
        """
        return True

    def step_logs(self):
        """Hook: {name: scalar tensor} for the logs, of released quantities only."""
        return {}

    def step_on_lot(
        self, engine, lot, expected_lot_size, *, on_batch=None, regularization_gradients=None
    ):
        """Takes one step on one lot that was charged: clipped sum, release, update.

        The hook of `DPModel.fit` and `tf_adadp.private_step`; custom loops call the latter.

        Args:
            engine: a gradient engine, see `tf_adadp.gradients`.
            lot: `((x, y, sample_weight), mask)`.
            expected_lot_size, regularization_gradients: see `apply_private`.
            on_batch: see the engine's `clipped_sum`; for logs.

        Returns:
            The sum of the examples' losses: a raw statistic, for logs only.
        """
        # One set for clipping and for noise, worked out once.
        clipping_set = self.clipping_set()
        token = _SET_OF_STEP.set(clipping_set)
        try:
            sums, loss = self._clipped_sum(
                engine, lot, clipping_set, self.example_seed(), expected_lot_size, on_batch
            )
            self.apply_private(sums, expected_lot_size, regularization_gradients)
        finally:
            _SET_OF_STEP.reset(token)
        return loss

    def _clipped_sum(self, engine, lot, clipping_set, seed, expected_lot_size, on_batch=None):
        """The engine's `clipped_sum` with this optimizer's microbatches and copies."""
        self._require_noise_multiplier()
        return engine.clipped_sum(
            lot,
            clipping_set,
            seed,
            on_batch=on_batch,
            microbatch_size=self.microbatch_size,
            num_slots=self.num_slots(expected_lot_size) // replicas.num_replicas(),
            augmentation_multiplicity=self.augmentation_multiplicity,
        )

    def num_slots(self, expected_lot_size):
        """M = R·round(L/(k·R)), at least R: the number of slots of a lot (int32 tensor).

        Each of R replicas has slots of its own: an example draws one of those where it is.
        """
        # Here, where custom loops come by as well.
        replicas.check_microbatches(tf.distribute.get_strategy(), self.microbatch_size)
        each = self.microbatch_size * replicas.num_replicas()
        slots = tf.round(tf.cast(expected_lot_size, tf.float32) / each)
        return tf.maximum(tf.cast(slots, tf.int32), 1) * replicas.num_replicas()

    @tf.autograph.experimental.do_not_convert
    def apply_private(self, sums, expected_lot_size, regularization_gradients=None):
        """Adds the noise to a clipped sum and takes one step with the result.

        Args:
            sums: the `ClippedSums` that `clipped_sum` returned for one whole lot. Of a plain list
                neither the clipping set nor the lot is known: it is refused where the optimizer's
                set depends on releases, and otherwise it is on you that every lot is charged, and
                released from, once.
            expected_lot_size: L, a public constant: the mean of the lot size's law.
            regularization_gradients: gradients of losses that depend on the weights alone, added
                after the noise; a list with None where there is none.

        One call is one release of `event(law)`: charge the ledger before calling.

        Raises:
            ValueError: sums of other shapes than the variables; sums without their clipping set;
                a second release from a lot that was charged for one. In a `tf.function` the last
                is a `tf.errors.InvalidArgumentError`, when it runs.
        """
        self._require_noise_multiplier()
        self._check_shapes(sums)
        self._check_lot_size(expected_lot_size)
        if regularization_gradients is not None and len(regularization_gradients) != len(sums):
            raise ValueError(
                f"regularization_gradients has {len(regularization_gradients)} entries for "
                f"{len(sums)} variables: give one for each, None where there is none."
            )
        self._check_set_is_known(sums)
        lot = getattr(sums, "lot", None)
        with tf.control_dependencies(self.charges.claim(lot, self._trainable_variables)):
            released = self._release(sums, expected_lot_size)
            if regularization_gradients is not None:
                released = [
                    g if r is None else g + tf.cast(r, g.dtype)
                    for g, r in zip(released, regularization_gradients, strict=True)
                ]
            with _releasing():
                super().apply(released, self._trainable_variables)

    def _check_set_is_known(self, sums):
        """Refuses sums without their clipping set where that may have changed since."""
        if _SET_OF_STEP.get():
            return
        if isinstance(sums, clipping.ClippedSums) and not sums.intact:
            raise ValueError(
                "sums were changed since they were clipped, so neither their lot nor the noise "
                "that fits them is known. Release the sums of each lot as clipped_sum returned "
                "them; to use more records in a step, make the lots larger."
            )
        adapts = type(self).clipping_set is not DPOptimizer.clipping_set
        if adapts and getattr(sums, "clipping_set", None) is None:
            raise ValueError(
                f"sums do not say which set they were clipped to, and the clipping set of "
                f"{type(self).__name__} changes with its releases, so no noise can be fitted to "
                "them. Pass what clipped_sum returned, as it is (a copy, or what a tf.function "
                "returned, has lost its set); or call tf_adadp.private_step. For sums of your own: "
                "tf_adadp.ClippedSums(sums, clipping_set), with the optimizer.clipping_set() that "
                "they were clipped to."
            )

    def _release(self, sums, expected_lot_size):
        """g̃, from the noisy mean and the public constant a."""
        made_with = _SET_OF_STEP.get() or getattr(sums, "clipping_set", None)
        clipping_set = made_with or self.clipping_set()
        released, stddevs = self._noisy_mean(clipping_set, sums, expected_lot_size)
        self._observe(released, stddevs)
        if clipping_set.center is not None:
            released = [g + a for g, a in zip(released, clipping_set.center, strict=True)]
        return released

    def _noisy_mean(self, clipping_set, sums, expected_lot_size):
        """What the step is charged for: the sums with noise, over L; and the noise's std."""
        stddevs = clipping_set.noise_stddev(self.noise_multiplier, len(sums))
        # A fresh key lives and dies with its own counter, so no restored step can make it meet the
        # same counter twice; a seeded one follows the step, so that a run can be repeated.
        release = self._noise_key.next_step()
        step = release if self.seed is None else tf.cast(self.iterations.value, tf.int64)
        return self._with_noise(sums, stddevs, expected_lot_size, step)

    def _divisor(self, expected_lot_size):
        """L, or the number of slots: what sums are divided by, a public float32."""
        self._check_lot_size(expected_lot_size)
        if self.microbatch_size > 1:
            expected_lot_size = self.num_slots(expected_lot_size)
        return tf.cast(expected_lot_size, tf.float32)

    def _check_lot_size(self, expected_lot_size):
        """Refuses a lot size that is not above 0, where it is known."""
        known = tf.get_static_value(expected_lot_size)
        known = expected_lot_size if known is None else known
        if not tf.is_tensor(known):
            check_number("expected_lot_size", known, above=0)

    def _with_noise(self, sums, stddevs, expected_lot_size, step, noise_multiplier=None):
        """`(sums + noise)/L` and the noise's std over L; `step` is never used twice under a key.

        noise_multiplier: that of these stddevs, where it is another than the optimizer's.
        """
        self._require_noise_multiplier()
        if noise_multiplier is None:
            noise_multiplier = self.noise_multiplier
        if self.noise_multiplier > 0:
            sums, stddevs = noise.add_gaussian(
                sums,
                stddevs,
                self._noise_key.key,
                step,
                noise_multiplier=noise_multiplier,
                secure=self.secure_noise,
            )
        divisor = self._divisor(expected_lot_size)
        return [s / divisor for s in sums], [std / divisor for std in stddevs]

    def _observe(self, released, stddevs):
        """Hook: updates the state of K from a released vector and its noise's std."""

    def _check_shapes(self, sums):
        shapes = [tuple(v.shape) for v in self._trainable_variables]
        if [tuple(s.shape) for s in sums] != shapes:
            raise ValueError(
                f"sums of shapes {[tuple(s.shape) for s in sums]} for variables of shapes "
                f"{shapes}: pass what clipped_sum returned with this optimizer's clipping_set()."
            )

    def apply(self, grads, trainable_variables=None):
        """Refused: raw gradients are not private. See `apply_private`."""
        _refuse_raw_gradients(self)
        return super().apply(grads, trainable_variables)

    def apply_gradients(self, grads_and_vars):
        """Refused: raw gradients are not private. See `apply_private`."""
        _refuse_raw_gradients(self)
        return super().apply_gradients(grads_and_vars)

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        """Refused: raw gradients are not private. See `apply_private`."""
        _refuse_raw_gradients(self)
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        """Keras's update rule of one variable; refused outside `apply_private`."""
        _refuse_raw_gradients(self)
        return super().update_step(gradient, variable, learning_rate)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        _refuse_raw_gradients(self)
        super()._backend_update_step(grads, trainable_variables, learning_rate)

    def _all_reduce_sum_gradients(self, grads_and_vars):
        """Nothing to add up: a release is the same on all replicas."""
        return grads_and_vars

    def _distributed_tf_update_step(self, distribution, grads_and_vars, learning_rate):
        # Keras may call it in a thread for all replicas, which the permission did not reach.
        with _releasing():
            super()._distributed_tf_update_step(distribution, grads_and_vars, learning_rate)

    def load_own_variables(self, store):
        """Restores the public state; noise and examples' randomness go on under new keys.

        Raises:
            ValueError: the stored variables are not those of this optimizer. None is changed.
        """
        self._check_stored(store)
        super().load_own_variables(store)
        self.renew_keys()

    def _check_stored(self, store):
        """Refuses the state of another optimizer, which Keras would pass by with a warning."""
        names, mine = set(store.keys()), [tuple(v.shape) for v in self.variables]
        stored = len(names)
        # Of an optimizer that was never built there are at most its steps and its rate.
        if not self.built or not stored or stored <= 2 < len(mine):
            return  # nothing to restore, as Keras says in a warning
        ordered = [str(i) for i in range(stored)]
        theirs = [tuple(np.shape(store[name])) for name in ordered if name in names]
        if mine != theirs:
            differs = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
                min(len(mine), len(theirs)),
            )
            raise ValueError(
                f"the file holds {stored} variables of an optimizer, this {type(self).__name__} "
                f"has {len(mine)}, and they differ from number {differs} on: it was saved by "
                "another optimizer, by one of other arguments or weights, or by another version of "
                "tf_adadp. Make the optimizer that was saved (`load_model` does); or start its "
                "state anew with `load_weights(path, skip_mismatch=True)`, which keeps the ledger."
            )

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """The optimizer that `get_config` described. Arguments it does not have get defaults.

        Raises:
            ValueError: on a configuration that this version cannot honour, as a whole.
        """
        try:
            parameters = inspect.signature(cls.__init__).parameters.values()
            if "noise_multiplier" not in config and any(
                p.kind is p.VAR_KEYWORD or p.name == "noise_multiplier" for p in parameters
            ):
                raise ValueError("noise_multiplier is missing, which no default can stand for.")
            return super().from_config(config, custom_objects)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"tf_adadp {__version__} can make no {cls.__name__} of this configuration: {error} "
                "It was written by another version, or edited; leaving a part of it out might "
                "change what is private. Load it with the version that saved it; or make the "
                "optimizer anew, and load the weights with their ledger by `load_weights`."
            ) from error

    def get_config(self):
        """The arguments of the constructor. The noise key is no part of it."""
        config = super().get_config()
        for name in ("gradient_accumulation_steps", "loss_scale_factor"):
            config.pop(name, None)
        config.update(
            noise_multiplier=self.noise_multiplier,
            l2_norm_clip=self.l2_norm_clip,
            automatic_clipping=self.automatic_clipping,
            microbatch_size=self.microbatch_size,
            augmentation_multiplicity=self.augmentation_multiplicity,
            seed=self.seed,
            allow_no_noise=self.allow_no_noise,
            secure_noise=self.secure_noise,
        )
        return config


@contextlib.contextmanager
def _releasing():
    token = _RELEASING.set(True)
    try:
        yield
    finally:
        _RELEASING.reset(token)


def _refuse_raw_gradients(optimizer):
    if not _RELEASING.get():
        raise RuntimeError(
            f"{type(optimizer).__name__} takes no raw gradients: they are not private. Wrap the "
            "model, `tf_adadp.DPModel(model)`, and compile that with this optimizer; in a custom "
            "loop call `optimizer.apply_private(clipped_sum(...), expected_lot_size)`."
        )


def _check_noise_multiplier(noise_multiplier, allow_no_noise):
    if noise_multiplier is None:
        return  # see `_require_noise_multiplier`
    wanted = (
        "a finite number above 0 (noise std over sensitivity); "
        "tf_adadp.accounting.calibrate_noise_multiplier finds it for an ε"
    )
    check_number("noise_multiplier", noise_multiplier, wanted, at_least=0)
    if noise_multiplier == 0 and not allow_no_noise:
        raise ValueError(
            "noise_multiplier=0 trains without privacy (ε = ∞). If that is what you want, as a "
            "baseline, say allow_no_noise=True; otherwise give a number above 0."
        )


def _path(variable):
    return getattr(variable, "path", None) or variable.name


def _read_only_names(cls):
    """The arguments of a class and its bases that their Keras optimizers do not have, as x and _x.

    Those are baked into traced graphs and charged by: a later change would release with one value
    and charge another.
    """
    names = set()
    for base in cls.__mro__:
        parents = [
            parent
            for parent in base.__mro__
            if issubclass(parent, keras.optimizers.Optimizer)
            and not issubclass(parent, DPOptimizer)
        ]
        parents = {p for parent in (*parents, keras.optimizers.Optimizer) for p in parent.__mro__}
        if base not in parents:
            names |= _arguments(base).difference(*map(_arguments, parents))
    return frozenset(names | {f"_{name}" for name in names} | {"charges"})


def _arguments(cls):
    """The names of the arguments of the `__init__` that a class has of its own."""
    own = vars(cls).get("__init__")
    parameters = [] if own is None else list(inspect.signature(own).parameters.values())[1:]
    return {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


DPOptimizer._read_only = _read_only_names(DPOptimizer)
