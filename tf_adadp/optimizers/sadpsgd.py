"""SA-DPSGD: DP-SGD whose steps are candidates, kept or undone by simulated annealing."""

import math
from collections.abc import Sequence
from typing import Any

import dp_accounting
import keras
import numpy as np
import tensorflow as tf
from scipy import special

from tf_adadp import noise
from tf_adadp.accounting import SamplingLaw
from tf_adadp.accounting.bounds.theorem1 import classical_epsilon
from tf_adadp.optimizers.base import DPOptimizer
from tf_adadp.optimizers.sadpsgd_energy import (
    Annealing,
    Energy,
    brief,
    check_form,
    check_overlap,
    leaves,
)
from tf_adadp.sampling import make_lot
from tf_adadp.sampling.sources import ArraySource
from tf_adadp.utils.checks import check_choice, check_delta, check_integer, check_number

_Relation = dp_accounting.NeighboringRelation
_SET_LATER = object()  # from_config: the records are in no file
# First words of the draws under the annealing key; beyond those of noise and examples, which a
# `seed` puts under an equal key.
_ACCEPTANCE, _ENERGY_NOISE = 2**32, 2**32 + 1
_ORDERS = range(2, 65)  # of the paper


@keras.saving.register_keras_serializable(package="tf_adadp")
class SADPSGD(DPOptimizer, keras.optimizers.SGD):
    """Simulated annealing DP-SGD (Fu et al., "SA-DPSGD: Differentially Private Stochastic Gradient
    Descent based on Simulated Annealing", Algorithm 2), with every candidate charged.

        w' = w − η · (Σ_x clip_C(g_x) + N(0, σ*²C² I)) / L          the candidate, a release
        ΔE = J(w') − J(w),   J(w) = Σ_i weight_i · ℓ(w; x_i, y_i) / n   over n `energy_data`
        keep w' with probability min(1, exp(−ΔE·Q)), or if μ ≥ μ0;   otherwise stay at w

    with Q = Q0·τ (Q0 at the first candidate), τ the candidates kept so far, μ the rejections in a
    row. ℓ is the compiled loss in inference mode; regularisers are not part of J. A candidate with
    a weight or an energy that is not finite is rejected always, also at the threshold. A rejection
    restores the weights and the optimizer's state (momentum, moving averages of the weights: over
    kept weights only) bit by bit; `iterations`, and with it a learning rate schedule, counts
    candidates, and a `QuantileClip` follows them all.

    Guarantee: EVERY candidate is charged, kept or not, as one step of DP-SGD (see `DPOptimizer`):
    the published result depends on the rejected ones too. Keeping a candidate is
    post-processing of released weights

    - where `energy_data` are public: not records that ε is to protect, not the training data, and
      not the test data either, whose score would be selected on. This is the default.
    - where they are private and `energy_noise_multiplier` σ_e is given: each record's change of
      weight_i·ℓ is clipped to [−c, c], c = `energy_clip` (0 where it is not finite), and

          ΔE = (Σ_i clip_c(ℓ_i(w') − ℓ_i(w)) + N(0, σ_e²c²)) / n

      is released, n being public. One record moves the sum by c under add-or-remove, by 2c under
      replace-one, so each candidate costs a Gaussian mechanism of σ_e, or σ_e/2, besides; it is not
      amplified, since all records are used each time. Both events are summed. That is an upper
      bound: a record is in one of the two data sets (and it would hold for one in both).

    `variant="printed"` is the paper: J on private data without noise, charged ε = ∞. The paper
    charges kept candidates only, which is not a bound; see `epsilon_as_published`.

    Neither configurations nor files hold `energy_data`: after loading, `set_energy_data` is asked
    for before training goes on. τ and μ are saved with the optimizer, keys never.

    In a custom loop call `optimizer.bind(model, loss)` before the first `apply_private`, and
    `optimizer.begin(law, lots, 1)` for the checks that `DPModel.fit` makes.

    Args:
        learning_rate: η, a float or a Keras schedule.
        energy_data: (x, y) or (x, y, sample_weight), arrays or structures of arrays as for `fit`.
            Required. They are copied.
        initial_temperature: Q0 ≥ 0; 0 keeps every candidate. (The paper calls Q a temperature; it
            is an inverse one: the larger, the fewer worse candidates are kept.)
        rejection_threshold: μ0 ≥ 0.
        energy_batch_size: how many records of energy_data are evaluated at once; memory only.
        energy_noise_multiplier: σ_e > 0 for private energy_data, None for public.
        energy_clip: c > 0, with energy_noise_multiplier.
        variant: "sound" or "printed".
        momentum, nesterov: as in `keras.optimizers.SGD`.
        **kwargs: see `DPOptimizer` (training needs noise_multiplier) and `keras.optimizers.SGD`.

    Attributes:
        accepted: τ, a Keras variable, once built. `fit` logs it as "accepted": the candidates kept
            since the optimizer was made.
        rejections: μ, likewise.

    Raises:
        ValueError: on an argument that is missing or out of range; on public energy_data with
            values that are not finite; when training begins, on energy_data of another form than
            the training data, that overlap them, or on which the loss is not finite. Overlap is
            seen where arrays share memory or are equal as a whole; copies of some of the rows, and
            data that lots do not hold as arrays, are not compared.

    Example:
        >>> public = np.zeros((8, 4), "float32"), np.zeros((8, 1), "float32")
        >>> optimizer = dp.SADPSGD(1.0, noise_multiplier=1.1, energy_data=public)
        >>> optimizer.event(accounting.PoissonSampling(num_examples=60000, expected_size=600))
        PoissonSampledDpEvent(sampling_probability=0.01,
        event=GaussianDpEvent(noise_multiplier=1.1))
    """

    distributable = False
    covers_metrics = True
    releases_one_sum = False  # the fate of a candidate depends on the one before
    moves_every_step = False  # a rejection does not show that nothing can be trained

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1.0,
        *,
        energy_data: Any = None,
        initial_temperature: float = 10.0,
        rejection_threshold: int = 10,
        energy_batch_size: int = 256,
        energy_noise_multiplier: float | None = None,
        energy_clip: float | None = None,
        variant: str = "sound",
        momentum: float = 0.0,
        nesterov: bool = False,
        **kwargs: Any,
    ):
        initial_temperature = check_number("initial_temperature", initial_temperature, at_least=0)
        rejection_threshold = check_integer("rejection_threshold", rejection_threshold, at_least=0)
        energy_batch_size = check_integer("energy_batch_size", energy_batch_size, at_least=1)
        check_choice("variant", variant, ("sound", "printed"))
        if energy_noise_multiplier is not None:
            if variant == "printed":
                raise ValueError(
                    f"energy_noise_multiplier={energy_noise_multiplier!r} with variant='printed', "
                    "which adds no noise: use variant='sound'."
                )
            energy_noise_multiplier = check_number(
                "energy_noise_multiplier",
                energy_noise_multiplier,
                "a finite number above 0, or None where energy_data are public",
                above=0,
            )
            energy_clip = check_number(
                "energy_clip",
                energy_clip,
                "a number in [1e-10, 1e10], the bound on what one record of private energy_data "
                "may change (below, float32 noise would vanish)",
                at_least=1e-10,
                at_most=1e10,
            )
        elif energy_clip is not None:
            raise ValueError(
                f"energy_clip={energy_clip!r} without energy_noise_multiplier: it belongs to "
                "private energy_data. Give both, or neither where the data are public."
            )
        super().__init__(
            learning_rate=learning_rate, momentum=momentum, nesterov=nesterov, **kwargs
        )
        self.initial_temperature = initial_temperature
        self.rejection_threshold = rejection_threshold
        self.energy_batch_size = energy_batch_size
        self.energy_noise_multiplier = energy_noise_multiplier
        self.energy_clip = energy_clip
        self.variant = variant
        self._annealing_key = noise.SecretKey(self.seed, "annealing")
        self._annealing = Annealing()
        if energy_data is not _SET_LATER:
            if not isinstance(energy_data, (tuple, list)) or len(energy_data) not in (2, 3):
                raise ValueError(
                    f"energy_data={brief(energy_data)}: give (x, y) or (x, y, sample_weight), "
                    "held-out records that candidates are compared on."
                )
            self.set_energy_data(*energy_data)

    def set_energy_data(self, x: Any, y: Any, sample_weight: Any = None) -> None:
        """Gives the energy_data to an optimizer that was loaded or made from a config.

        Raises:
            ValueError: as the constructor; or the optimizer has them already.
        """
        if self._annealing.source is not None:
            raise ValueError(
                "energy_data are set, and traced graphs hold them. Make a new optimizer for others."
            )
        try:
            source = ArraySource(x, y, sample_weight)
            if len(source) == 0:
                raise ValueError("x has no rows.")
            with tf.init_scope():
                lot = make_lot(x, y, sample_weight, min(self.energy_batch_size, len(source)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"energy_data: {error}") from error
        # An exception may not depend on private records; in their sum such values count 0.
        if self.energy_noise_multiplier is None:
            for leaf in leaves(lot[0]):
                if leaf.dtype.is_floating and not np.isfinite(leaf.numpy()).all():
                    raise ValueError(
                        "energy_data hold values that are not finite: no candidate could be "
                        "compared on them. Drop those records."
                    )
        self._annealing.source, self._annealing.lot = source, lot

    def _build_private(self, variables):
        super()._build_private(variables)
        self.accepted = self._add_state((), "accepted", "int64")
        self.rejections = self._add_state((), "rejections", "int64")

    def bind(self, model: keras.Model, loss: Any) -> None:
        """Gives the optimizer the model and the loss for J; `DPModel` calls it by itself.

        Args:
            model: the plain, built `keras.Model` whose trainable variables it is built on.
            loss: a Keras loss (object, name or function), or the one that `compile` made of it.
        """
        if loss is None:
            raise ValueError(
                "loss=None: SADPSGD compares candidates by the compiled loss; losses that layers "
                "add are no part of it. Give a loss to compile."
            )
        self._annealing.model, self._annealing.loss = model, loss
        self._annealing.energy = None

    def begin(self, law: SamplingLaw, lots: Any, steps_per_execution: int) -> None:
        """Checks energy_data against the lots and the model. Nothing is released."""
        super().begin(law, lots, steps_per_execution)
        source = self._annealing.source
        if lots is not None and source is not None:
            check_form(source, lots.element_spec)
            if self._is_public:
                check_overlap(source, lots.source)
        energy = self._energy()
        weights = [tf.convert_to_tensor(v.value) for v in self._trainable_variables]
        try:
            if self.energy_noise_multiplier is not None:
                # Looks at labels, as `fit` does at those it trains on; the value is dropped.
                energy.clipped_change(weights, weights, tf.constant(self.energy_clip))
                return
            start = energy.mean(weights)
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(
                "The loss cannot be found on energy_data; look for labels outside of the classes: "
                f"{error.message}"
            ) from None
        if not np.isfinite(start):
            raise ValueError(
                f"The loss on energy_data is {float(start)} at the weights that training begins "
                "with, so no candidate can be compared with them. Look for labels and records "
                "that the loss does not bear, or for weights that are not finite."
            )
        energy.remember(start, weights)

    @property
    def _is_public(self):
        return self.variant == "sound" and self.energy_noise_multiplier is None

    def _energy(self):
        """Returns the `Energy`; raises, in time, where a part of it is missing."""
        annealing = self._annealing
        if annealing.model is None:
            raise RuntimeError(
                "SADPSGD needs the model that it trains: call `optimizer.bind(model, loss)`"
                " before the first step of a custom loop."
            )
        if annealing.source is None:
            raise ValueError(
                "energy_data are missing: they are in no configuration and in no file. Call "
                "`optimizer.set_energy_data(x, y)` with the held-out records before training."
            )
        if annealing.energy is None:
            with tf.init_scope():
                annealing.energy = Energy(
                    annealing, one_by_one=self.energy_noise_multiplier is not None
                )
        trained = annealing.energy.variables
        if len(trained) != len(self._trainable_variables) or any(
            a is not b for a, b in zip(trained, self._trainable_variables, strict=True)
        ):
            raise ValueError(
                "The model given to `bind` has other trainable variables than this SADPSGD was "
                "built on: bind the model that is trained."
            )
        return annealing.energy

    @tf.autograph.experimental.do_not_convert
    def apply_private(
        self,
        sums: Sequence[tf.Tensor],
        expected_lot_size: tf.Tensor | float,
        regularization_gradients: Sequence[tf.Tensor | None] | None = None,
    ) -> None:
        """Makes a candidate, see `DPOptimizer.apply_private`, and keeps or undoes it.

        Raises:
            RuntimeError, ValueError: before anything is released, without `bind` or energy_data.
        """
        energy = self._energy()
        draw = self._annealing_key.next_step()
        if self.seed is not None:
            draw = tf.cast(self.iterations.value, tf.int64)
        first = tf.equal(self.iterations.value, 0)
        variables = self._trainable_variables
        weights = [tf.identity(v.value) for v in variables]
        state = self._undone_state()
        before = [tf.identity(v.value) for v in state]
        if self.use_ema:  # Keras starts an average at its first step, and would take zeros for one
            for average, w in zip(self._model_variables_moving_average, weights, strict=True):
                i = next((i for i, v in enumerate(state) if v is average), None)
                if i is not None:
                    before[i] = tf.where(first, tf.cast(w, average.dtype), before[i])

        super().apply_private(sums, expected_lot_size, regularization_gradients)

        candidate = [tf.convert_to_tensor(v.value) for v in variables]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(w)) for w in candidate])
        if self.energy_noise_multiplier is None:
            old, new = energy.current(weights), energy.mean(candidate)
            finite &= tf.math.is_finite(new)
            change = new - old
        else:
            # Nothing of this is kept: the energy of private records is a raw statistic.
            change = energy.clipped_change(weights, candidate, tf.constant(self.energy_clip))
            stddev = self.energy_noise_multiplier * self.energy_clip
            (change,), _ = noise.add_gaussian(
                [change],
                [stddev],
                self._annealing_key.key,
                draw,
                noise_multiplier=self.energy_noise_multiplier,
                secure=self.secure_noise,
                index=_ENERGY_NOISE,
            )
            change /= energy.count
        accept = finite & self._accepts(change, first, draw)

        for v, b in zip([*variables, *state], [*weights, *before], strict=True):
            v.assign(tf.where(accept, v.value, b))
        if self.energy_noise_multiplier is None:
            energy.remember(
                tf.where(accept, new, old), [tf.convert_to_tensor(v.value) for v in variables]
            )
        self.accepted.assign_add(tf.cast(accept, tf.int64))
        self.rejections.assign(tf.where(accept, tf.zeros([], tf.int64), self.rejections.value + 1))

    def _undone_state(self):
        """Returns the optimizer's variables that a rejection restores.

        All but counters, the rate, and a clip norm that is adapted: its count is paid for.
        """
        counters = [self.iterations, self.accepted, self.rejections]
        kept = [*counters, self._learning_rate, self._adapted_norm]
        return [v for v in self.variables if not any(v is k for k in kept)]

    def _accepts(self, change, first, draw):
        """Lines 12 and 13 of Algorithm 2."""
        tau = tf.where(first, tf.ones([], tf.float64), tf.cast(self.accepted.value, tf.float64))
        uniform = tf.random.stateless_uniform(
            [],
            seed=noise.stream(self._annealing_key.key, draw, _ACCEPTANCE),
            dtype=tf.float64,
            alg="philox",
        )
        probability = tf.exp(-change * self.initial_temperature * tau)
        at_threshold = self.rejections.value >= self.rejection_threshold
        return (change <= 0) | (uniform <= probability) | at_threshold

    def step_logs(self) -> dict[str, tf.Tensor]:
        """Returns {"accepted": τ}, a released quantity (unless printed, where ε = ∞)."""
        return {**super().step_logs(), "accepted": tf.cast(self.accepted.value, tf.float32)}

    def event(self, law: SamplingLaw) -> dp_accounting.DpEvent:
        """Returns DP-SGD's event, with that of ΔE if energy_data are private; ε = ∞ if printed."""
        self._require_noise_multiplier()
        if self.variant == "printed":
            return dp_accounting.NonPrivateDpEvent()
        step = super().event(law)
        if self.energy_noise_multiplier is None:
            return step
        if law.unit != "record":
            raise ValueError(
                f"energy_noise_multiplier={self.energy_noise_multiplier} protects one record of "
                f"energy_data, and these lots protect one {law.unit}: how many of the records are "
                "of one is not bounded. Give energy_data that need no protection."
            )
        halved = law.neighboring_relation is _Relation.REPLACE_ONE
        of_energy = dp_accounting.GaussianDpEvent(self.energy_noise_multiplier / (1 + halved))
        return dp_accounting.ComposedDpEvent([step, of_energy])

    def epsilon_as_published(self, law: SamplingLaw, delta: float) -> float:
        """Returns the ε that the paper would claim for this run, which is NO privacy guarantee.

            min over α in 2..64 of  τ·log(A_α)/(α−1) + log(1/δ)/(α−1)
            A_α = Σ_k C(α,k) (1−q)^(α−k) q^k exp((k²−k)/(2σ*²)),   q = L/N

        (Theorem 1, eq. 4, with the logarithm that is missing in print, Lemma 2). It counts the
        accepted candidates alone, though the published result depends on the rejected ones. In one
        dimension, at σ* = 1.23, ε = 1 and a rejection threshold of 10, the δ claimed this way can
        be five times too small. (Where few candidates are rejected this ε may lie above the
        ledger's all the same: its conversion is the looser.) The guarantee is `DPModel.epsilon`.

        Args:
            law: the sampling law of the lots.
            delta: δ in (0, 1).
        """
        if not isinstance(law, SamplingLaw) or law.record_probability is None:
            raise ValueError(f"law={law!r}: give a PoissonSampling or a FixedSizeSampling.")
        delta = check_delta(delta)
        accepted = int(self.accepted) if self.built else 0
        if accepted == 0:
            return 0.0
        if self.noise_multiplier == 0:
            return math.inf
        q = law.record_probability
        rdp = []
        for order in _ORDERS:
            k = np.arange(order + 1)
            terms = (
                np.log(special.comb(order, k))
                + special.xlog1py(order - k, -q)
                + k * math.log(q)
                + (k**2 - k) / (2 * self.noise_multiplier**2)
            )
            rdp.append(accepted * max(0.0, special.logsumexp(terms)) / (order - 1))
        return classical_epsilon(_ORDERS, rdp, delta)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor but energy_data, which are in no file."""
        config = super().get_config()
        config.update(
            initial_temperature=self.initial_temperature,
            rejection_threshold=self.rejection_threshold,
            energy_batch_size=self.energy_batch_size,
            energy_noise_multiplier=self.energy_noise_multiplier,
            energy_clip=self.energy_clip,
            variant=self.variant,
        )
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict | None = None) -> DPOptimizer:
        """Makes the optimizer that `get_config` described; it waits for `set_energy_data`."""
        return super().from_config({**config, "energy_data": _SET_LATER}, custom_objects)
