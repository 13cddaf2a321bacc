"""Gives every private optimizer one noisy release per lot, then Keras's own update rule."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import dp_accounting
import keras
import tensorflow as tf

from tf_adadp import clipping, noise
from tf_adadp.accounting import PrivacyLedger, SamplingLaw
from tf_adadp.charging.charges import Charged, Charges
from tf_adadp.distribution import replicas
from tf_adadp.optimizers import guards
from tf_adadp.optimizers.planned_noise import PlannedNoise
from tf_adadp.optimizers.statistics import Statistics
from tf_adadp.utils.checks import check_bool, check_integer


class DPOptimizer(guards.Guards, Charged, PlannedNoise, Statistics):
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
    neighbours, the multiplier is σ*/2; for users with up to k records in a lot it is σ*/k.

    A private optimizer refuses raw gradients: `apply`, `apply_gradients` and `stateless_apply`
    raise an error, before any weight changes. Arguments that set the privacy are read-only, as the
    attributes x and _x of each argument x. For other values make a new optimizer.

    A class of your own may define `clipping_set`, `_build_private`, `_observe` and an update rule.
    None of them meets a raw gradient; `audit.replay_difference` looks for leaks past the release.
    Leave `apply_private` and `step_on_lot` as they are: they have raw sums.

    Args:
        learning_rate: a number or a Keras schedule; None: the default of the Keras optimizer.
        noise_multiplier: σ* > 0, noise std over sensitivity. It sets the privacy, so there is no
            default: made with None it waits for the budget of `compile(target_epsilon=…)`, and
            refuses to be charged or to release before. 0 only with `allow_no_noise=True`, ε = ∞.
        l2_norm_clip: C > 0; or a `QuantileClip`, for a C that follows the gradients' norms; or a
            dict {variable path prefix: bound} for one ball per prefix: the longest prefix wins and
            every trainable variable must match one.
        automatic_clipping: None, or γ > 0: every gradient is divided by its norm plus γ and scaled
            to l2_norm_clip, small ones up as well (AUTO-S, Bu et al. 2022), see `AutoSGD`. Not
            for boxes, which have no norm.
        microbatch_size: k ≥ 1; k > 1 clips sums over slots of k examples in expectation and
            doubles the sensitivity.
        augmentation_multiplicity: K ≥ 1; with K > 1 the gradient of an example is the mean over K
            draws of the model's random layers (`RandomTranslation`, dropout, …), taken before it
            is clipped, so the sensitivity is that of K = 1 (De et al. 2022, "Unlocking
            high-accuracy differentially private image classification through scale"). A step costs
            about K times as much.
        seed: for tests only: makes noise, sampling and dropout reproducible. Anyone who knows it
            can subtract the noise; every report then says "reproducible noise".
        allow_no_noise: see noise_multiplier.
        secure_noise: whether sums and noise are rounded to one grid before they are added, a
            defence against attacks on floating-point bits, at three to four times the cost of the
            noise; `tf_adadp.noise` describes its defence and its limits.
        **keras_arguments: those of the Keras optimizer (weight_decay, use_ema, …).
            `gradient_accumulation_steps` and `loss_scale_factor` are refused.

    Raises:
        ValueError: on an argument that is missing, of the wrong type or out of range.

    Example:
        >>> class DPNadam(dp.DPOptimizer, keras.optimizers.Nadam):
        ...     "Nadam on a private gradient."
        ...
        >>> DPNadam(0.001, noise_multiplier=1.1).noise_multiplier
        1.1
    """

    moves_every_step: ClassVar[bool] = True  # False where a step may leave the weights as they were
    distributable: ClassVar[bool] = True  # False if branches contain collective operations
    # Whether a class that defines its own event, charge or step counts metrics released from the
    # same lot: its event covers them, and its step shows every example to `on_batch` once. Not
    # inherited.
    covers_metrics: ClassVar[bool] = True
    # True if the next step's event depends on earlier releases.
    event_varies: ClassVar[bool] = False
    # Whether a step is one noisy sum and nothing else, so that K steps on one lot are one Gaussian
    # mechanism of multiplier σ*/√K.
    releases_one_sum: ClassVar[bool] = True

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule | None = None,
        *,
        noise_multiplier: float | None = None,
        l2_norm_clip: float | dict[str, float] | clipping.QuantileClip = 1.0,
        automatic_clipping: float | None = None,
        microbatch_size: int = 1,
        augmentation_multiplicity: int = 1,
        seed: int | None = None,
        allow_no_noise: bool = False,
        secure_noise: bool = False,
        **keras_arguments: Any,
    ):
        guards.check_keras_arguments(type(self).__name__, keras_arguments)
        noise_multiplier = guards.check_noise_multiplier(noise_multiplier, allow_no_noise)
        if learning_rate is not None:
            keras_arguments["learning_rate"] = guards.check_learning_rate(learning_rate)
        super().__init__(**keras_arguments)
        self.noise_multiplier = noise_multiplier
        self.waits_for_budget = noise_multiplier is None
        self._l2_norm_clip = guards.check_clip(l2_norm_clip)
        self.automatic_clipping = guards.check_automatic_clipping(automatic_clipping)
        if self.adapts_clip_norm and automatic_clipping is not None:
            self._refuse_quantile_clip(
                f"automatic_clipping={automatic_clipping!r}", "it clips by no norm: C is a factor"
            )
        self.microbatch_size = guards.check_microbatch_size(microbatch_size)
        self.augmentation_multiplicity = check_integer(
            "augmentation_multiplicity", augmentation_multiplicity, at_least=1
        )
        self.seed = guards.check_seed(seed)
        self.allow_no_noise = bool(allow_no_noise)
        self.secure_noise = check_bool("secure_noise", secure_noise)
        self._noise_key = noise.SecretKey(self.seed)
        self._example_key = noise.SecretKey(self.seed, "examples")
        self.charges = Charges(self, self._noise_key)
        self._build_failed = False

    # State

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the state of the update rule and of the clipping set."""
        if self.built:
            self._check_variables(variables)
            return
        # Outside of a graph that is being traced: values are set once, not whenever it runs.
        with self._building(), tf.init_scope():
            if not self.adapts_clip_norm:
                clipping.bounds_for(_paths(variables), self.l2_norm_clip)  # checks the prefixes
            super().build(variables)
            self.built = False
            self._build_statistics()
            self._build_saved_noise()
            self._build_private(variables)
            self.built = True
        self.charges.attach(variables)

    def _build_private(self, variables):
        """Creates the state of `clipping_set`. A hook, called once after Keras's own state.

        Make it by `_add_state` and `_add_slots`, which are saved, restored and checked. A graph
        reads a plain Python attribute once, when it is traced.
        """

    def _add_slots(self, name, variables):
        """Returns a new variable of zeros for each of the variables: float32, of its shape."""
        return [self._add_state(tuple(v.shape), f"{name}_{i}") for i, v in enumerate(variables)]

    def _add_state(self, shape, name, dtype="float32", initializer="zeros"):
        """Returns a new variable of released state; of several replicas, alike on all."""
        return self.add_variable(
            shape, initializer=initializer, dtype=dtype, aggregation="only_first_replica", name=name
        )

    # One step

    def clipping_set(self) -> clipping.ClippingSet:
        """Returns the set K of this step, from released state only."""
        if isinstance(self.l2_norm_clip, dict):
            bounds = clipping.bounds_for(_paths(self._trainable_variables), self.l2_norm_clip)
            return clipping.LayerBalls(*bounds, gamma=self.automatic_clipping)
        ball = clipping.L2Ball(self.current_clip_norm(), gamma=self.automatic_clipping)
        return self.with_statistics(ball)

    def step_on_lot(
        self,
        engine: Any,
        lot: tuple,
        expected_lot_size: tf.Tensor | float,
        *,
        on_batch: Callable | None = None,
        regularization_gradients: Sequence[tf.Tensor | None] | None = None,
    ) -> tf.Tensor:
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
        clipping_set = self.clipping_set()
        sums, loss = self._clipped_sum(
            engine, lot, clipping_set, self.example_seed(), expected_lot_size, on_batch
        )
        # The noise is that of the set that gradients were clipped to, worked out once.
        sums = clipping.ClippedSums(sums, clipping_set)
        self.apply_private(sums, expected_lot_size, regularization_gradients)
        return loss

    def _clipped_sum(self, engine, lot, clipping_set, seed, expected_lot_size, on_batch=None):
        """Returns the engine's `clipped_sum` with this optimizer's microbatches and copies."""
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

    @tf.autograph.experimental.do_not_convert
    def apply_private(
        self,
        sums: Sequence[tf.Tensor],
        expected_lot_size: tf.Tensor | float,
        regularization_gradients: Sequence[tf.Tensor | None] | None = None,
    ) -> None:
        """Adds the noise to a clipped sum and takes one step with the result.

        Args:
            sums: the `ClippedSums` that `clipped_sum` returned for one whole lot. Of a plain list
                neither the clipping set nor the lot is known. It is refused where the optimizer's
                set depends on releases; otherwise you must charge every lot, and release from it,
                once.
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
        self._check_sums(
            sums, bool(self.statistics) or type(self).clipping_set is not DPOptimizer.clipping_set
        )
        guards.check_lot_size(expected_lot_size)
        guards.check_regularization(regularization_gradients, self._trainable_variables)
        lot = getattr(sums, "lot", None)
        with tf.control_dependencies(self.charges.claim(lot, self._trainable_variables)):
            released = self._release(sums, expected_lot_size)
            if regularization_gradients is not None:
                released = [
                    g if r is None else g + tf.cast(r, g.dtype)
                    for g, r in zip(released, regularization_gradients, strict=True)
                ]
            with guards.releasing():
                super().apply(released, self._trainable_variables)

    def _release(self, sums, expected_lot_size):
        """Returns g̃: the noisy mean plus the public constant a."""
        clipping_set = getattr(sums, "clipping_set", None) or self.clipping_set()
        released, stddevs = self._noisy_mean(clipping_set, sums, expected_lot_size)
        released, stddevs, statistics = self._apart(released, stddevs)
        if "loss" in statistics:
            self._observe_loss(*statistics["loss"])
        self._observe(released, stddevs)
        if "count" in statistics:
            self._adapt_clip_norm(statistics["count"][0])
        if clipping_set.center is not None:
            released = [g + a for g, a in zip(released, clipping_set.center, strict=True)]
        return released

    def _noisy_mean(self, clipping_set, sums, expected_lot_size):
        """Returns the noisy mean gradient and its noise standard deviation."""
        stddevs = clipping_set.noise_stddev(self.noise_multiplier, len(self._trainable_variables))
        # A fresh key lives and dies with its own counter, so no restored step can make it meet the
        # same counter twice; a seeded one follows the step, so that a run can be repeated.
        release = self._noise_key.next_step()
        step = release if self.seed is None else tf.cast(self.iterations.value, tf.int64)
        return self._with_noise(sums, stddevs, expected_lot_size, step)

    def _divisor(self, expected_lot_size):
        """Returns L, or the number of slots, that sums are divided by: a public float32."""
        guards.check_lot_size(expected_lot_size)
        if self.microbatch_size > 1:
            expected_lot_size = self.num_slots(expected_lot_size)
        return tf.cast(expected_lot_size, tf.float32)

    def _with_noise(self, sums, stddevs, expected_lot_size, step, noise_multiplier=None):
        """Returns `(sums + noise)/L` and the noise's std over L. No key meets a `step` twice.

        noise_multiplier: that of these stddevs, if it is not the optimizer's.
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
        """Updates the state of K from a released vector and its noise's std. A hook.

        Args:
            released: g̃ without the centre a, one float32 tensor for each variable, of its shape:
                the noisy sum over L.
            stddevs: the std of its noise, in the same units: tensors that broadcast to the shapes.
        """

    def _observe_loss(self, loss, stddev):
        """Takes in the released mean of the scaled losses and its noise's std. A hook."""

    def example_seed(self) -> tf.Tensor:
        """Returns a fresh int64 [2] seed for the examples' randomness: dropout, microbatch slots.

        The key is secret: anyone who knows the slots, or could replay the masks, would know how one
        record moves the contributions of the others.
        """
        step = self._example_key.next_step()
        if self.seed is not None:
            step = tf.cast(self.iterations.value, tf.int64)
        seed = noise.stream(self._example_key.key, step, 0)
        # The low half of the first word is for the physical batches of a replica's share.
        return seed + tf.stack([replicas.replica_number() * 2**32, tf.zeros([], tf.int64)])

    def num_slots(self, expected_lot_size: tf.Tensor | float) -> tf.Tensor:
        """Returns M = R·round(L/(k·R)), at least R: the number of slots of a lot, int32.

        Each of R replicas has slots of its own: an example draws one of those where it is.
        """
        # Checked here because custom loops call it as well.
        replicas.check_microbatches(tf.distribute.get_strategy(), self.microbatch_size)
        each = self.microbatch_size * replicas.num_replicas()
        slots = tf.round(tf.cast(expected_lot_size, tf.float32) / each)
        return tf.maximum(tf.cast(slots, tf.int32), 1) * replicas.num_replicas()

    # Description

    def event(self, law: SamplingLaw) -> dp_accounting.DpEvent:
        """Returns the privacy event of one step on a lot drawn by `law`.

        For laws that charge a whole pass it is the event of the pass; `law.charges` spreads it
        over steps.
        """
        self._require_noise_multiplier()
        return self._sum_event(law, self.noise_multiplier)

    def _sum_event(self, law, noise_multiplier):
        """Returns the event of one noisy clipped sum and of the metrics released with it."""
        microbatched = self.microbatch_size > 1
        sigma_m = self.metrics_noise_multiplier
        if sigma_m is None:
            return law.event(noise_multiplier, microbatched=microbatched)
        return law.event_with_metrics(noise_multiplier, sigma_m, microbatched=microbatched)

    # Hooks of a run

    def before_charge(self, ledger: PrivacyLedger, law: SamplingLaw, steps: int) -> None:
        """Counts `steps` releases against the optimizer's own budget; raises if it has no room."""

    def bind(self, model: keras.Model, loss: Any) -> None:
        """Receives the plain model and its loss, once, before `step_on_lot` is traced."""

    def begin(self, law: SamplingLaw, lots: Any, steps_per_execution: int) -> None:
        """Checks a run before anything is trained.

        Args:
            law: the sampling law that the run will be charged by.
            lots: the lots; None where one batch is given.
            steps_per_execution: as compiled.
        """

    def plan_steps(self, steps: int, total: int | None = None) -> None:
        """Tells the optimizer how many steps a run takes, before its first; see `FoundRate`."""

    def can_continue(self, law: SamplingLaw) -> bool:
        """Tells whether the optimizer's own budget has room for another step.

        It depends on released state only. Training stops at the first execution after which it is
        False.
        """
        return True

    def step_logs(self) -> dict[str, tf.Tensor]:
        """Returns scalars for the logs, by name, of released quantities only."""
        return {"clip_norm": self.current_clip_norm()} if self.adapts_clip_norm else {}

    # Devices, keys and configuration

    @property
    def kept_on_one_device(self) -> str | None:
        """Returns the class or option that several replicas cannot run together, or None."""
        if not self.distributable:
            return type(self).__name__
        if getattr(self, "ema_overwrite_frequency", None) is not None and self.use_ema:
            return f"ema_overwrite_frequency={self.ema_overwrite_frequency}"
        return None

    @property
    def steps_taken(self) -> int:
        """Returns `iterations` as an int, outside of graphs, also on several devices."""
        return int(self.iterations.numpy())

    @property
    def secret_keys(self) -> dict[str, noise.SecretKey]:
        """Returns the keys of noise and of the examples' randomness, by attribute."""
        return {name: k for name, k in vars(self).items() if isinstance(k, noise.SecretKey)}

    def renew_keys(self, agree: Callable[[Any], Any] | None = None) -> None:
        """Draws new keys for noise and examples' randomness; see `noise.SecretKey.renew`."""
        for key in self.secret_keys.values():
            key.renew(agree)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor; no key is among them."""
        config = super().get_config()
        for name in ("gradient_accumulation_steps", "loss_scale_factor"):
            config.pop(name, None)
        config.update(
            noise_multiplier=None if self.waits_for_budget else self.noise_multiplier,
            l2_norm_clip=keras.saving.serialize_keras_object(self.l2_norm_clip),
            automatic_clipping=self.automatic_clipping,
            microbatch_size=self.microbatch_size,
            augmentation_multiplicity=self.augmentation_multiplicity,
            seed=self.seed,
            allow_no_noise=self.allow_no_noise,
            secure_noise=self.secure_noise,
        )
        return config


def _paths(variables):
    return [getattr(v, "path", None) or v.name for v in variables]
