"""DPOPT: noise shaped by how much each coordinate matters."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

from tf_adadp import clipping as sets
from tf_adadp import noise
from tf_adadp.accounting import SamplingLaw, joint_noise_multiplier
from tf_adadp.clipping.row_gradients import product
from tf_adadp.optimizers import guards
from tf_adadp.optimizers.adaptive_noise import AdaptiveNoise
from tf_adadp.optimizers.priors import Prior
from tf_adadp.optimizers.priors.base import normalized
from tf_adadp.utils.checks import check_choice, check_number

_NAMES = ("released", "uniform", "budgeted")


@keras.saving.register_keras_serializable(package="tf_adadp")
class DPOPT(AdaptiveNoise, keras.optimizers.SGD):
    """Directional noise: the least Σ abs(w_i)·s_i, for importances w.

    (Xiang et al., "Differentially-Private Deep Learning from an Optimization Perspective", INFOCOM
    2019, and its journal form.)

    With v_i the prior's second moment of coordinate i and C the clip norm:

    - `clipping="ellipsoid"`: ‖v/b‖₂ ≤ 1 and s = σ*·b with b_i ∝ (v_i / abs(w_i))^(1/3): the least
      Σ abs(w_i)·b_i among ellipsoids with one Σ v_i/b_i², that clip alike. b = C·r, mean(r²) = 1.
    - `clipping="local"`: the box abs(v_i) ≤ c_i = β·C·r_i/√m, r from the prior alone, with the
      noise that is best for w, s_i = σ*·(Σ_j (c_j·abs(w_j))^(2/3))^(1/2) · c_i^(2/3) ·
      abs(w_i)^(-1/3).

    So important coordinates get LESS noise. A ball has no directions: for it isotropic noise,
    DP-SGD's, is the optimum.

    Guarantee: w and v are public or from past releases, and both sets meet rule (R), so a step
    costs one Gaussian mechanism of multiplier σ*; see `DPOptimizer`. With
    `directions="budgeted"` a step releases the lot's clipped sum a second time, at multiplier
    σ_w, before: two Gaussians on one lot, the second of which depends on the first, at most one of
    multiplier (1/σ*² + 1/σ_w²)^(-1/2), whichever way the lot was sampled.

    `variant="printed"` is the paper's closed form, which swaps a minimum and a maximum: Δ ∝ w is
    held fixed, and s_i ∝ abs(w_i)^(1/3) gives important coordinates MORE noise, for vectors clipped
    to the ball. An example that lies along a coordinate of little noise breaks the bound, so it is
    charged ε = ∞.

    Args:
        learning_rate: η, a float or a Keras schedule.
        directions: w. "released": the running mean of released vectors; "uniform": 1; "budgeted":
            a release of its own in every step; or public arrays, a list with one per variable.
            Absolute values are raised towards 0.4 of their root mean square.
        direction_noise_multiplier: σ_w > 0, of "budgeted", required there.
        direction_decay: in [0, 1), of the running mean of "released".
        clipping: "ellipsoid" or "local".
        pruning: p in [0, 1): the share of each variable's coordinates that a step leaves alone.
            Their steps stay in a residual (error feedback) until they are among
            the largest. Mask and residual come from past releases: a residual of raw gradients
            would be uncharged state. 0 for none.
        variant: "sound" or "printed".
        prior, warmup_steps, local_clip_factor, prior_decay, prior_exponent: see `AdaptiveNoise`;
            the exponent defaults to 1/3.
        momentum, nesterov: as in `keras.optimizers.SGD`.
        **kwargs: see `DPOptimizer` (training needs noise_multiplier) and `keras.optimizers.SGD`.

    Raises:
        ValueError: on directions that are not finite numbers, or, when built, do not have the
            shapes of the variables.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> optimizer = dp.DPOPT(
        ...     directions="budgeted", direction_noise_multiplier=3.0, noise_multiplier=1.0
        ... )
        >>> optimizer.event(law)
        PoissonSampledDpEvent(sampling_probability=0.01,
        event=GaussianDpEvent(noise_multiplier=0.9486832980505138))
    """

    covers_metrics = True
    _default_exponent = 1 / 3

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1.0,
        *,
        directions: str | Sequence[np.ndarray] = "released",
        direction_noise_multiplier: float | None = None,
        direction_decay: float = 0.99,
        clipping: str = "ellipsoid",
        pruning: float = 0.0,
        variant: str = "sound",
        prior: str | Prior = "released",
        warmup_steps: int | None = None,
        local_clip_factor: float = 1.0,
        prior_decay: float | None = None,
        prior_exponent: float | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        **kwargs: Any,
    ):
        check_choice("variant", variant, ("sound", "printed"))
        if isinstance(directions, str):
            check_choice("directions", directions, _NAMES)
        else:
            directions = _check_arrays(directions)
        direction_decay = check_number("direction_decay", direction_decay, at_least=0, below=1)
        pruning = check_number("pruning", pruning, at_least=0, below=1)
        if (directions == "budgeted") != (direction_noise_multiplier is not None):
            raise ValueError(
                f"direction_noise_multiplier={direction_noise_multiplier!r} with directions="
                f'{directions!r}: "budgeted" releases w in every step and needs it; the others do '
                "not, leave it out."
            )
        if direction_noise_multiplier is not None:
            direction_noise_multiplier = check_number(
                "direction_noise_multiplier",
                direction_noise_multiplier,
                above=0,
            )
        if prior == "raw":
            raise ValueError('prior="raw" belongs to ADADP and ADAN. Leave it out.')
        super().__init__(
            learning_rate=learning_rate,
            clipping=clipping,
            prior=prior,
            warmup_steps=warmup_steps,
            local_clip_factor=local_clip_factor,
            prior_decay=prior_decay,
            prior_exponent=prior_exponent,
            local_clip_threshold=0.0,
            momentum=momentum,
            nesterov=nesterov,
            **kwargs,
        )
        if self.adapts_clip_norm and variant == "printed":
            self._refuse_quantile_clip('variant="printed"', "the noise of the print fits one ball")
        self.directions = directions
        self.direction_noise_multiplier = direction_noise_multiplier
        self.direction_decay = direction_decay
        self.pruning = pruning
        self.variant = variant
        self._direction_key = noise.SecretKey(self.seed, "directions")
        self._in_step = False

    def _build_private(self, variables):
        self._check_directions(variables)
        self._direction = self._add_slots("direction", variables)
        self._residual = self._add_slots("residual", variables) if self.pruning else []
        for i, direction in enumerate(self._direction):
            if self.directions == "uniform":
                direction.assign(tf.ones(tuple(direction.shape)))
            elif not isinstance(self.directions, str):
                direction.assign(np.asarray(self.directions[i], np.float32))
        super()._build_private(variables)

    def _check_directions(self, variables):
        if isinstance(self.directions, str):
            return
        shapes = [tuple(v.shape) for v in variables]
        given = [np.shape(w) for w in self.directions]
        if given != shapes:
            raise ValueError(
                f"directions have the shapes {given}, the trainable variables {shapes}: give one "
                "importance per weight."
            )

    def importances(self) -> list[tf.Tensor]:
        """Returns abs(w), per variable a tensor of its shape, of mean square 1 and floored."""
        squares = [tf.square(tf.convert_to_tensor(w.value)) for w in self._direction]
        return normalized(squares, [tuple(w.shape) for w in self._direction], exponent=0.5)

    def _next_factors(self):
        """Returns (v/abs(w))^(1/3), mean square 1, for ellipsoids; for boxes the prior's shape."""
        factors = super()._next_factors()
        if self.clipping == "local":
            return factors
        scales = [
            product(of) * tf.pow(w, -1 / 3)
            for of, w in zip(factors, self.importances(), strict=True)
        ]
        total = tf.add_n([tf.reduce_sum(tf.square(r)) for r in scales])
        return [(r * tf.math.rsqrt(total / self._num_scalars),) for r in scales]

    def clipping_set(self) -> sets.ClippingSet:
        """Returns the set of this step; see the class."""
        if self.variant == "printed":
            return _Printed(self.l2_norm_clip, self.importances())
        if self.clipping == "ellipsoid":
            return super().clipping_set()
        scale = self.local_clip_factor * self.l2_norm_clip / math.sqrt(self._num_scalars)
        bounds = [
            tf.broadcast_to(scale * r, w.shape)
            for r, w in zip(self.noise_shape(), self._direction, strict=True)
        ]
        return sets.Box(bounds, self.importances())

    def step_on_lot(
        self,
        engine: Any,
        lot: tuple,
        expected_lot_size: tf.Tensor | float,
        *,
        on_batch: Callable | None = None,
        regularization_gradients: Sequence[tf.Tensor | None] | None = None,
    ) -> tf.Tensor:
        """Returns one step; "budgeted" directions are released first, from the same lot."""
        if self.directions == "budgeted":
            ball = sets.L2Ball(self.current_clip_norm(), gamma=self.automatic_clipping)
            seed = self.example_seed()
            sums, _ = self._clipped_sum(engine, lot, ball, seed, expected_lot_size)
            self._release_directions(sums, ball)
        self._in_step = True
        try:
            return super().step_on_lot(
                engine,
                lot,
                expected_lot_size,
                on_batch=on_batch,
                regularization_gradients=regularization_gradients,
            )
        finally:
            self._in_step = False

    @tf.autograph.experimental.do_not_convert
    def apply_private(
        self,
        sums: Sequence[tf.Tensor],
        expected_lot_size: tf.Tensor | float,
        regularization_gradients: Sequence[tf.Tensor | None] | None = None,
    ) -> None:
        """See `DPOptimizer.apply_private`; part of `step_on_lot` where directions are budgeted."""
        if self.directions == "budgeted" and not self._in_step:
            raise RuntimeError(
                'directions="budgeted" are released from the same lot, before its sum is clipped: '
                "call tf_adadp.private_step in place of clipped_sum and apply_private."
            )
        super().apply_private(sums, expected_lot_size, regularization_gradients)

    def _release_directions(self, sums, ball):
        """Takes w from the sum that was clipped to a ball, with noise of multiplier σ_w."""
        guards.check_shapes(sums, self._trainable_variables)
        stddevs = ball.noise_stddev(self.direction_noise_multiplier, len(sums))
        release = self._direction_key.next_step()
        step = release if self.seed is None else tf.cast(self.iterations.value, tf.int64)
        released, _ = noise.add_gaussian(
            sums,
            stddevs,
            self._direction_key.key,
            step,
            noise_multiplier=self.direction_noise_multiplier,
            secure=self.secure_noise,
        )
        for w, r in zip(self._direction, released, strict=True):
            w.assign(r)
        self._keep_factors(self._next_factors())

    @property
    def uncharged_releases(self) -> int:
        """Extends that of `DPOptimizer`: directions that no step followed count as well."""
        # Only `step_on_lot` makes either, so the two are made in turns.
        alone = self._direction_key.releases - self._noise_key.releases
        return super().uncharged_releases + max(0, alone)

    def _release(self, sums, expected_lot_size):
        released = super()._release(sums, expected_lot_size)
        if not self.pruning:
            return released
        moves = []
        for residual, r in zip(self._residual, released, strict=True):
            size = math.prod(residual.shape)
            past = tf.reshape(tf.abs(tf.convert_to_tensor(residual.value)), [size])
            # Exactly as many in every step, also of equal ones: the first residuals are all 0.
            chosen = tf.math.top_k(past, max(1, round((1.0 - self.pruning) * size))).indices
            mask = tf.tensor_scatter_nd_update(
                tf.zeros([size], tf.bool), chosen[:, None], tf.ones_like(chosen, tf.bool)
            )
            mask = tf.reshape(mask, residual.shape)
            total = residual.value + r
            moves.append(tf.where(mask, total, 0.0))
            residual.assign(tf.where(mask, 0.0, total))
        return moves

    def _observe(self, released, stddevs):
        if self.directions == "released":
            for w, r in zip(self._direction, released, strict=True):
                w.assign(self.direction_decay * w.value + (1.0 - self.direction_decay) * r)
        super()._observe(released, stddevs)

    def event(self, law: SamplingLaw) -> dp_accounting.DpEvent:
        """Returns one Gaussian event; its multiplier covers "budgeted" directions as well."""
        self._require_noise_multiplier()
        if self.variant == "printed":
            return dp_accounting.NonPrivateDpEvent()
        if self.directions != "budgeted" or self.noise_multiplier == 0:
            return super().event(law)
        both = joint_noise_multiplier(self.noise_multiplier, self.direction_noise_multiplier)
        return self._sum_event(law, both)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        config = super().get_config()
        del config["local_clip_threshold"]
        directions = self.directions
        if not isinstance(directions, str):
            directions = [w.tolist() for w in directions]
        config.update(
            directions=directions,
            direction_noise_multiplier=self.direction_noise_multiplier,
            direction_decay=self.direction_decay,
            pruning=self.pruning,
            variant=self.variant,
        )
        return config


class _Printed(sets.L2Ball):
    """The ball with the paper's noise, s_i ∝ abs(w_i)^(1/3), for Δ = C·w/‖w‖ alone. Not private."""

    def __init__(self, l2_norm_clip, importances):
        super().__init__(l2_norm_clip)
        self._importances = importances

    def noise_stddev(self, noise_multiplier, num_variables):
        """Returns σ*·C·(Σ abs(w)^(4/3))^(1/2)·abs(w_i)^(1/3) / ‖w‖."""
        w = self._importances
        powers = tf.add_n([tf.reduce_sum(tf.pow(x, 4 / 3)) for x in w])
        squares = tf.add_n([tf.reduce_sum(tf.square(x)) for x in w])
        scale = noise_multiplier * self._l2_norm_clip * tf.sqrt(powers / squares)
        return [scale * tf.pow(x, 1 / 3) for x in w]


def _check_arrays(directions):
    wanted = f"one of {', '.join(map(repr, _NAMES))}, or a list with one array of finite numbers"
    try:
        arrays = [np.asarray(w, np.float32) for w in directions]
    except (TypeError, ValueError) as error:
        raise ValueError(f"directions={directions!r}: give {wanted} per variable.") from error
    if not arrays or not all(np.all(np.isfinite(w)) for w in arrays):
        raise ValueError(f"directions hold an infinite number or NaN, or nothing: give {wanted}.")
    return arrays
