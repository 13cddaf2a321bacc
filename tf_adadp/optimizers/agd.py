"""AGD: gradient descent whose privacy budget per iteration grows when the noise is too large."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp import noise
from tf_adadp.gradients.lot_losses import clipped_loss_sum
from tf_adadp.optimizers import guards
from tf_adadp.optimizers.agd_budget import GRADIENT, REMEASURE, SELECT, RenyiBudget, host_number
from tf_adadp.optimizers.base import DPOptimizer
from tf_adadp.utils.checks import check_choice, check_integer, check_number

_MOVES_PER_WINDOW = 10  # accepted moves between two updates of the largest step
_ARGUMENTS = (
    "total_epsilon", "total_delta", "splits", "loss_clip", "num_candidates", "budget_growth",
    "max_step_size", "step_size_growth", "variant",
)  # fmt: skip


@keras.saving.register_keras_serializable(package="tf_adadp")
class AGD(RenyiBudget, DPOptimizer, keras.optimizers.SGD):
    """Gradient descent with an adaptive privacy budget per iteration (Lee and Kifer 2018, KDD).

    Every Keras step takes one lot of its own, makes one release, and costs one event:

        GRADIENT   S ← (Σ_x clip_C(g_x) + N(0, σ²C²I)) / L,  σ = 1/√(2ρ);  then SELECT
        SELECT     α from {0, …, α_max} by the scores Σ_x min(max(ℓ_x(θ − α·d), 0), C_obj),
                   d = (S + r)/‖S + r‖, r the gradient of the weight regularisers
                   α > 0: θ ← θ − α·d; then GRADIENT
                   α = 0: S was too noisy: ρ ← (1 + γ)ρ; then REMEASURE
        REMEASURE  S' as in GRADIENT, with the difference ρ_new − ρ_old for its budget;
                   S ← (ρ_old·S + (ρ_new − ρ_old)·S')/ρ_new, the mean of least variance of the
                   noise; then SELECT

    After every 10 moves α_max becomes (1 + η) times the largest of them.

    The choice is an exponential mechanism, by Gumbel noise, of parameter ε_s = 2/σ₀: weights
    ∝ exp(−ε_s·score/Δ), Δ = C_obj under add or remove (scores are monotone), 2C_obj under replace
    one. Losses that are not finite count as C_obj. They hold the example's weight, the losses that
    layers add, and dropout in training mode with the same draws for every candidate; weight
    regularisers are not part of the scores.

    Guarantee: (total_epsilon, total_delta)-differential privacy for everything that the releases
    charged to one ledger by AGD amount to, under the neighbouring relation of the lots; for a
    budget that is neither chosen nor raised by results of training. GRADIENT
    and REMEASURE are Gaussians of a multiplier known from earlier releases on a sampled lot,
    `law.event(σ)`; SELECT costs `accounting.selection.selection_event`. A Rényi filter, whose order
    and budget are fixed when training begins, is asked before each, and training stops where the
    rest of a round does not fit: see `accounting.filters.RenyiFilter`, also on why the ε of a
    ledger, which may read lower, is no guarantee of its own here. The "pld" accountant refuses
    these events; use "rdp".

    The first budget ρ = 1/(2σ₀²) is such that `splits` rounds of one GRADIENT and one SELECT cost
    the whole budget; later ones grow, so there are fewer. A move takes two lots at least.
    `steps_per_execution` has to be 1. There is no noise_multiplier: that attribute stays 1, the
    unit of σ. There is no learning rate to choose, and no momentum or weight decay: a candidate
    must equal the weights after the step; for decay use weight regularisers.

    Args:
        total_epsilon, total_delta: the budget. total_epsilon = ∞ adds no noise at all, only with
            allow_no_noise=True, and is charged ε = ∞.
        splits: rounds that the first ρ divides the budget into. Many rounds of much noise, whose
            budget grows where it has to, train better than the 60 of the authors' code.
        l2_norm_clip: C, see `DPOptimizer`.
        loss_clip: C_obj > 0.
        num_candidates: step lengths tried, evenly spaced in [0, α_max], at least 2.
        budget_growth: γ > 0.
        max_step_size: the first α_max > 0: a length, since d has norm 1.
        step_size_growth: η ≥ 0.
        variant: "sound", or "printed": the choice as in the authors' code, which ADDS exponential
            noise to the scores it minimises. That has no guarantee near ε_s: charged ε = ∞, while
            the budget still counts its claim.
        microbatch_size, augmentation_multiplicity, seed, allow_no_noise, secure_noise: see
            `DPOptimizer`. Scores take examples one by one and draw random layers once.
        name: as in Keras.

    Raises:
        ValueError: on arguments out of range; at the beginning of a run, before anything is
            trained, on steps_per_execution ≠ 1, on lots of unknown sampling, and on a budget
            without room for a round.

    Example:
        >>> optimizer = dp.AGD(total_epsilon=3.0, total_delta=1e-5)
        >>> optimizer.total_epsilon, optimizer.total_delta
        (3.0, 1e-05)
    """

    distributable = False
    event_varies = True
    releases_one_sum = False
    moves_every_step = False
    # Also of subclasses: the budget counts all of their releases about the same weights.
    ledger_origin = "AGD"

    def __init__(
        self,
        *,
        total_epsilon: float,
        total_delta: float,
        splits: int = 640,
        l2_norm_clip: float | dict[str, float] = 3.0,
        loss_clip: float = 3.0,
        num_candidates: int = 21,
        budget_growth: float = 0.1,
        max_step_size: float = 1.0,
        step_size_growth: float = 0.1,
        variant: str = "sound",
        microbatch_size: int = 1,
        augmentation_multiplicity: int = 1,
        seed: int | None = None,
        allow_no_noise: bool = False,
        secure_noise: bool = False,
        name: str = "agd",
    ):
        exact = total_epsilon == math.inf
        if exact and not allow_no_noise:
            raise ValueError(
                "total_epsilon=inf trains without privacy. If that is what you want, as a "
                "baseline, say allow_no_noise=True; otherwise give a number above 0."
            )
        positive = "a finite number above 0"
        if not exact:
            total_epsilon = check_number("total_epsilon", total_epsilon, positive, above=0)
        total_delta = check_number("total_delta", total_delta, above=0, below=1)
        super().__init__(
            learning_rate=1.0,
            noise_multiplier=0.0 if exact else 1.0,
            l2_norm_clip=l2_norm_clip,
            microbatch_size=microbatch_size,
            augmentation_multiplicity=augmentation_multiplicity,
            seed=seed,
            allow_no_noise=allow_no_noise,
            secure_noise=secure_noise,
            name=name,
        )
        if self.adapts_clip_norm:
            self._refuse_quantile_clip("AGD", "its measurements are of many lots, at one C")
        self.total_epsilon = total_epsilon
        self.total_delta = total_delta
        self.splits = check_integer("splits", splits, at_least=1)
        self.loss_clip = check_number(
            "loss_clip", loss_clip, "a number in [1e-10, 1e10]", at_least=1e-10, at_most=1e10
        )
        self.num_candidates = check_integer("num_candidates", num_candidates, at_least=2)
        self.budget_growth = check_number("budget_growth", budget_growth, positive, above=0)
        self.max_step_size = check_number("max_step_size", max_step_size, positive, above=0)
        self.step_size_growth = check_number("step_size_growth", step_size_growth, at_least=0)
        self.variant = check_choice("variant", variant, ("sound", "printed"))
        self._exact = exact
        self._selection_key = noise.SecretKey(self.seed, "selection")

    def _build_private(self, variables):
        def scalar(name, dtype):
            return self._add_state((), name, dtype)

        self._phase = scalar("phase", "int32")
        self._gradient_budget = scalar("gradient_budget", "float64")  # ρ
        self._measurement_budget = scalar("measurement_budget", "float64")  # of the next one
        self._max_step = scalar("max_step", "float32")
        self._max_step.assign(self.max_step_size)
        self._step_size = scalar("step_size", "float32")  # chosen last
        self._largest_move = scalar("largest_move", "float32")  # since the last change of max_step
        self._moves = scalar("moves", "int32")
        self._direction = self._add_slots("direction", variables)
        # Set by `_start`, from public numbers; `spent` by `before_charge`.
        self._selection_epsilon = scalar("selection_epsilon", "float64")
        self._filter_order = scalar("filter_order", "float64")
        self._spent = scalar("spent", "float64")
        # Examples by which neighbouring lots differ: 1 add or remove, 2 replace; 0: not begun.
        self._changed_examples = scalar("changed_examples", "int32")
        if self._exact:
            self._gradient_budget.assign(1.0)
            self._measurement_budget.assign(1.0)

    def bind(self, model: keras.Model, loss: Any) -> None:
        """Refuses a model without a loss: candidates are scored by the examples' losses."""
        if loss is None:
            raise ValueError(
                "loss=None: a loss without per-example values for AGD, which scores candidate "
                "steps by the loss of every example. Compile with a loss."
            )

    # One step, in the graph

    @tf.autograph.experimental.do_not_convert
    def step_on_lot(
        self,
        engine: Any,
        lot: tuple,
        expected_lot_size: tf.Tensor | float,
        *,
        on_batch: Callable | None = None,
        regularization_gradients: Sequence[tf.Tensor | None] | None = None,
    ) -> tf.Tensor:
        """Returns one step of the state machine, see the class and `DPOptimizer.step_on_lot`."""
        # Counted once for the branches together: noise is drawn under a number that is never used
        # twice, and a choice is a release like the others.
        release = self._noise_key.next_step()
        step = release if self.seed is None else tf.cast(self.iterations.value, tf.int64)
        seed = self.example_seed()

        def measure():
            sums, loss = self._clipped_sum(
                engine, lot, self.clipping_set(), seed, expected_lot_size, on_batch
            )
            guards.check_shapes(sums, self._trainable_variables)
            self._average(self._release(sums, expected_lot_size, step))
            return [tf.zeros(v.shape) for v in self._trainable_variables], loss

        def select():
            direction = self._unit_direction(regularization_gradients)
            trainable = engine.example_loss.trainable_values()
            lengths = self._candidates()

            def at(length):
                return [
                    w - tf.cast(length * d, w.dtype)
                    for w, d in zip(trainable, direction, strict=True)
                ]

            def score(length):
                return clipped_loss_sum(engine, lot, at(length), seed, self.loss_clip)[0]

            # The first candidate is where the weights are: the loss for the logs comes with it.
            stay, loss = clipped_loss_sum(
                engine, lot, trainable, seed, self.loss_clip, on_batch=on_batch
            )
            scores = tf.map_fn(
                score, lengths[1:], fn_output_signature=tf.float64, parallel_iterations=1
            )
            length = tf.gather(lengths, self._choose(tf.concat([[stay], scores], 0), step))
            self._advance(length)
            return [length * d for d in direction], loss

        move, loss = tf.cond(tf.equal(self._phase.value, SELECT), select, measure)
        with guards.releasing():
            self.apply(move, self._trainable_variables)
        return loss

    def apply_private(
        self,
        sums: Sequence[tf.Tensor],
        expected_lot_size: tf.Tensor | float,
        regularization_gradients: Sequence[tf.Tensor | None] | None = None,
    ) -> None:
        """Refuses: a step of AGD needs more than a clipped sum."""
        raise RuntimeError(
            "AGD takes a lot, not a clipped sum: half of its steps look at losses. Train with "
            "`DPModel.fit`, or call tf_adadp.private_step."
        )

    def _release(self, sums, expected_lot_size, step):
        """Returns (sums + noise)/L at the multiplier of this measurement."""
        sigma = tf.cast(tf.math.rsqrt(2 * self._measurement_budget.value), tf.float32)
        stddevs = self.clipping_set().noise_stddev(self.noise_multiplier, len(sums))
        stddevs = [sigma * std for std in stddevs]
        return self._with_noise(sums, stddevs, expected_lot_size, step, sigma)[0]

    def _average(self, released):
        """Takes a release into S with its share of the budget: all of it in phase GRADIENT."""
        budget, part = self._gradient_budget.value, self._measurement_budget.value
        share = tf.cast(part / budget, tf.float32)
        first = tf.equal(self._phase.value, GRADIENT)
        for s, new in zip(self._direction, released, strict=True):
            s.assign(tf.where(first, new, (1 - share) * s.value + share * new))
        self._phase.assign(SELECT)

    def _unit_direction(self, regularization_gradients):
        """Returns d, the release plus the gradient of public losses, scaled to norm 1 (or 0)."""
        total = [tf.convert_to_tensor(s.value) for s in self._direction]
        if regularization_gradients is not None:
            total = [
                s if r is None else s + tf.cast(r, tf.float32)
                for s, r in zip(total, regularization_gradients, strict=True)
            ]
        largest = tf.reduce_max(
            [tf.reduce_max(tf.abs(t)) if t.shape.num_elements() else 0.0 for t in total]
        )
        usable = tf.math.is_finite(largest) & (largest > 0)
        # Scaled first, so that squares neither overflow nor vanish.
        total = [tf.where(usable, t / largest, 0.0) for t in total]
        norm = tf.linalg.global_norm(total)
        return [tf.math.divide_no_nan(t, norm) for t in total]

    def _candidates(self):
        """Returns the step lengths, float32 [num_candidates]; the first is 0."""
        fractions = tf.linspace(0.0, 1.0, self.num_candidates)
        return fractions * self._max_step.value

    def _choose(self, scores, step):
        """Returns the number of the candidate chosen by noisy scores, float64 [num_candidates]."""
        if self._exact:
            return tf.argmin(scores)
        sensitivity = self.loss_clip * tf.cast(self._changed_examples.value, tf.float64)
        scale = sensitivity / self._selection_epsilon.value
        draw = exponential(self._selection_key.key, step, self.num_candidates)
        if self.variant == "printed":
            return tf.argmin(scores + scale * draw)
        # −log of an exponential variate is a Gumbel variate; argmax of Gumbel + log-weight samples
        # proportionally to the weights.
        return tf.argmax(-scores / scale - tf.math.log(draw))

    def _advance(self, length):
        """Updates the state after a choice."""
        moved = length > 0
        budget = self._gradient_budget.value
        grown = tf.where(moved, budget, (1 + self.budget_growth) * budget)
        self._measurement_budget.assign(tf.where(moved, grown, grown - budget))
        self._gradient_budget.assign(grown)
        self._phase.assign(tf.where(moved, GRADIENT, REMEASURE))
        self._step_size.assign(length)
        moves = self._moves.value + tf.cast(moved, tf.int32)
        largest = tf.maximum(self._largest_move.value, length)
        due = moved & tf.equal(moves % _MOVES_PER_WINDOW, 0)
        self._moves.assign(moves)
        self._largest_move.assign(tf.where(due, 0.0, largest))
        self._max_step.assign(
            tf.where(due, (1 + self.step_size_growth) * largest, self._max_step.value)
        )

    def step_logs(self) -> dict[str, tf.Tensor]:
        """Returns the step length chosen last, and ρ: released, or computed from releases."""
        return {
            "step_size": tf.convert_to_tensor(self._step_size.value),
            "gradient_budget": tf.cast(self._gradient_budget.value, tf.float32),
        }

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Restores the state machine; the spent budget stays spent, and keys are new."""
        spent, order = host_number(self._spent), host_number(self._filter_order)
        super().load_own_variables(store)
        if spent > 0:
            # Costs at different orders cannot be compared: then nothing is left.
            same = order == host_number(self._filter_order)
            self._spent.assign(max(spent, host_number(self._spent)) if same else math.inf)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        config = super().get_config()
        shared = (
            "name", "l2_norm_clip", "microbatch_size", "augmentation_multiplicity", "seed",
            "allow_no_noise", "secure_noise",
        )  # fmt: skip
        # The rest is Keras's (learning_rate, momentum, …), which AGD does not take.
        return {
            **{name: config[name] for name in shared},
            **{name: getattr(self, name) for name in _ARGUMENTS},
        }


def exponential(key: tf.Tensor, step: tf.Tensor, size: int) -> tf.Tensor:
    """Returns `size` exponential variates of mean 1, float64, the same for the same (key, step).

    Args:
        key: int64 [2], secret.
        step: int64 scalar, never twice under one key.
        size: a Python int.

    −log of a uniform variate on a grid of 2⁻⁵² in (0, 1): above 37, and below 2⁻⁵³, there is none.
    That bends probabilities below 1e-15, no more than floats bend Gaussian noise.
    """
    seed = noise.stream(key, step, 0)
    bits = tf.random.stateless_uniform(
        [size], seed=seed, minval=None, maxval=None, dtype=tf.uint64, alg="philox"
    )
    bits = tf.bitwise.right_shift(bits, tf.constant(12, tf.uint64))
    return -tf.math.log((tf.cast(bits, tf.float64) + 0.5) * 2.0**-52)
