"""Shapes noise by a prior, for ADADP and ADAN."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import dp_accounting
import keras
import tensorflow as tf

from tf_adadp import clipping as sets
from tf_adadp.accounting import SamplingLaw
from tf_adadp.clipping.row_gradients import as_rows, product
from tf_adadp.optimizers.base import DPOptimizer
from tf_adadp.optimizers.priors import ExponentialPrior, Prior
from tf_adadp.optimizers.priors.raw import RawPrior, variance
from tf_adadp.utils.checks import check_choice, check_integer, check_number
from tf_adadp.utils.flat_groups import FlatGroups

_POOLINGS = {"factored": "both", "released": "row"}


class AdaptiveNoise(DPOptimizer):
    """Mixin: the clipping set and its noise follow a prior of each coordinate's size.

    With r the prior's shape (mean(r²) = 1, see `tf_adadp.optimizers.priors.Prior`), m the
    number of trainable scalars and C the clip norm:

    - `clipping="ellipsoid"`: ‖v/b‖₂ ≤ 1, b = C·r, noise s = σ*·b. r ≡ 1 is DP-SGD.
    - `clipping="local"` (the paper's): |v_i| ≤ c_i = β·C·r_i/√m, noise s_i = σ*·c_i·√m. At β = 1
      this box lies inside the ellipsoid and has the same noise, so the ellipsoid clips less at the
      same price.

    Both meet Σ v²/s² ≤ 1/σ*² (rule (R)) with equality at a corner, and r comes from past releases
    only, so a step costs one Gaussian mechanism of multiplier σ*; see `DPOptimizer`.

    `prior="raw"` is Algorithm 1 of the paper to the letter: c_i = β·√E'_i, s_i = β·σ*·√(m·E'_i),
    E' the average of the squared RAW gradient. It leaks (the noise scale is a raw statistic: where
    a coordinate is exactly 0 on one of two neighbours, the output has an atom), so it is charged
    ε = ∞.

    Args:
        clipping: "ellipsoid" or "local".
        prior: "factored" or "released" (an `ExponentialPrior` with the arguments below, its shape
            by rows and columns or by rows), another `Prior`, or "raw".
        warmup_steps: steps with DP-SGD's ball and noise before the prior is used. None: until the
            paper's switch, Var > G, of r (released) or of √E' (raw).
        local_clip_factor: β > 0, used by "local" and by the raw prior.
        prior_decay: γ' in [0, 1), of all but a `Prior`. None: 0.995, for "raw" the paper's 0.9.
        prior_exponent: p > 0, r ∝ (second moment)^p; of "factored" and "released". None: the
            class's default.
        local_clip_threshold: G ≥ 0 of the switch.
        **kwargs: see `DPOptimizer`; l2_norm_clip is one number here.
    """

    covers_metrics = True

    def __init__(
        self,
        *,
        clipping: str,
        prior: str | Prior,
        warmup_steps: int | None,
        local_clip_factor: float,
        prior_decay: float | None,
        prior_exponent: float | None,
        local_clip_threshold: float,
        **kwargs: Any,
    ):
        check_choice("clipping", clipping, ("ellipsoid", "local"))
        positive = "a finite number above 0"
        if isinstance(prior, dict):  # from a saved file
            prior = keras.saving.deserialize_keras_object(prior)
        if isinstance(prior, Prior):
            for name, value in (("prior_decay", prior_decay), ("prior_exponent", prior_exponent)):
                if value is not None:
                    raise ValueError(
                        f"{name}={value!r} beside prior={type(prior).__name__}(…): give it to the "
                        "prior."
                    )
        elif not isinstance(prior, str) or prior not in (*_POOLINGS, "raw"):
            raise ValueError(
                f"prior={prior!r}: give 'factored', 'released', 'raw' or an instance of a "
                "`tf_adadp.priors.Prior`."
            )
        local_clip_factor = check_number("local_clip_factor", local_clip_factor, positive, above=0)
        if prior_exponent is not None:
            prior_exponent = check_number("prior_exponent", prior_exponent, positive, above=0)
        if prior_decay is not None:
            prior_decay = check_number("prior_decay", prior_decay, at_least=0, below=1)
        local_clip_threshold = check_number(
            "local_clip_threshold", local_clip_threshold, at_least=0
        )
        if warmup_steps is not None:
            warmup_steps = check_integer(
                "warmup_steps", warmup_steps, "an integer ≥ 0, or None", at_least=0
            )
        if kwargs.get("automatic_clipping") is not None and clipping == "local":
            raise ValueError(
                f'automatic_clipping={kwargs["automatic_clipping"]!r} with clipping="local": a box '
                'clips coordinates, it has no norm to divide by. Use clipping="ellipsoid".'
            )
        if isinstance(kwargs.get("l2_norm_clip"), dict):
            raise ValueError(
                f"l2_norm_clip={kwargs['l2_norm_clip']!r}: {type(self).__name__} clips to one set "
                "over all variables and adapts its shape by itself; give one number."
            )
        super().__init__(**kwargs)
        if self.adapts_clip_norm and clipping == "local":
            self._refuse_quantile_clip('clipping="local"', "a box clips by no norm")
        if self.adapts_clip_norm and prior == "raw":
            self._refuse_quantile_clip('prior="raw"', "its bounds are the raw gradients' own")
        self.clipping = clipping
        self.prior = prior
        self.warmup_steps = warmup_steps
        self.local_clip_factor = local_clip_factor
        self.prior_decay = prior_decay
        self.prior_exponent = prior_exponent
        self.local_clip_threshold = local_clip_threshold
        if prior == "raw":
            self._prior = RawPrior(0.9 if prior_decay is None else prior_decay)
        elif isinstance(prior, str):
            decay = 0.995 if prior_decay is None else prior_decay
            exponent = self._default_exponent if prior_exponent is None else prior_exponent
            pooling = _POOLINGS[prior]
            self._prior = ExponentialPrior(decay=decay, pooling=pooling, exponent=exponent)
        else:
            self._prior = prior

    @property
    def kept_on_one_device(self) -> str | None:
        """See `DPOptimizer`."""
        return super().kept_on_one_device or (
            None if self._prior.distributable else type(self._prior).__name__
        )

    def _build_private(self, variables):
        self._num_scalars = sum(math.prod(v.shape) for v in variables)
        self._prior.build(self._add_state, variables)
        if self.prior == "raw" or not variables:  # a frozen model can be saved and loaded
            return
        # r is computed once per release and kept: computed again for the noise, it could differ
        # from the r that gradients were clipped with.
        factors = self._next_factors()
        for of, v in zip(factors, variables, strict=True):
            for r in of:
                if tf.broadcast_static_shape(r.shape, tf.TensorShape(v.shape)) != tuple(v.shape):
                    raise ValueError(
                        f"The prior {type(self._prior).__name__} has shape {tuple(r.shape)} for "
                        f"{v.path!r} of shape {tuple(v.shape)}. Return a shape that broadcasts to "
                        "it."
                    )
        self._num_factors = [len(of) for of in factors]
        self._factor_layout = FlatGroups([r.shape for of in factors for r in of])
        self._kept_factors = [
            self._add_state((n,), f"noise_shape_{j}")
            for j, n in enumerate(self._factor_layout.lengths())
        ]
        self._keep_factors(factors)

    def clipping_set(self) -> sets.ClippingSet:
        """Returns the set of this step: an ellipsoid or a box; in the warm-up the ball."""
        if self.prior == "raw":
            return _WithRawSum(self._printed_set())
        if self.clipping == "ellipsoid":
            scales = self._ellipsoid_scales()
            return self.with_statistics(sets.Ellipsoid(scales, gamma=self._relative_gamma()))
        kept = self._kept()
        scale = self.local_clip_factor * self.l2_norm_clip / math.sqrt(self._num_scalars)
        box = sets.Box(
            [
                tf.broadcast_to(scale * product(of), v.shape)
                for of, v in zip(self._unpacked(kept), self._trainable_variables, strict=True)
            ]
        )
        return sets.Switch(self._shape_is_warm(kept), box, sets.L2Ball(self.l2_norm_clip))

    def _ellipsoid_scales(self):
        """Returns C·r per variable, as a tuple of factors."""
        norm = self.current_clip_norm()
        vectors = self._factor_vectors()
        if max(self._num_factors) == 1:  # one product per vector in place of one per variable
            return self._unpacked([norm * r for r in vectors])
        return [(norm * of[0], *of[1:]) for of in self._unpacked(vectors)]

    def _relative_gamma(self):
        """Returns γ in the metric of the ellipsoid, where the clip norm is 1."""
        gamma = self.automatic_clipping
        return None if gamma is None else gamma / self.l2_norm_clip

    def noise_shape(self) -> list[tf.Tensor]:
        """Returns r of the next release, per variable a tensor that broadcasts to it.

        It is 1 while warming up, and follows from released state only, so it may be looked at.
        """
        if self.prior == "raw":
            raise ValueError('noise_shape: with prior="raw" the noise shows raw gradients.')
        return [product(of) for of in self._unpacked(self._factor_vectors())]

    def _factor_vectors(self):
        """Returns the factors of r as they are kept, the vectors of `_factor_layout`."""
        kept = self._kept()
        warm = self._shape_is_warm(kept)
        return [tf.where(warm, r, 1.0) for r in kept]

    def _kept(self):
        return [tf.convert_to_tensor(r.value) for r in self._kept_factors]

    def _unpacked(self, vectors):
        """Returns a tuple of factors per variable."""
        factors = iter(self._factor_layout.unpack(vectors))
        return [tuple(itertools.islice(factors, n)) for n in self._num_factors]

    def _printed_set(self):
        """Returns the set of Algorithm 1, lines 6–20."""
        root = self._prior.root()
        bounds = [self.local_clip_factor * r for r in root]
        if self.clipping == "ellipsoid":
            scales = [math.sqrt(self._num_scalars) * c for c in bounds]
            adapted = sets.Ellipsoid(scales, gamma=self._relative_gamma())
        else:
            adapted = sets.Box(bounds)
        ball = sets.L2Ball(self.l2_norm_clip, gamma=self.automatic_clipping)
        return sets.Switch(self._is_warm(root), adapted, ball)

    def _shape_is_warm(self, kept):
        """Tells whether the warm-up is over, from the factors of r."""
        if max(self._num_factors) > 1 and self.warmup_steps is None:
            kept = [product(of) for of in self._unpacked(kept)]
        return self._is_warm(kept)

    def _is_warm(self, shape):
        """Tells whether the warm-up is over, from released state (or, printed, from raw state)."""
        if self.warmup_steps is not None:
            return self.iterations.value >= self.warmup_steps
        return variance(shape) > self.local_clip_threshold

    @tf.autograph.experimental.do_not_convert
    def apply_private(
        self,
        sums: Sequence[tf.Tensor],
        expected_lot_size: tf.Tensor | float,
        regularization_gradients: Sequence[tf.Tensor | None] | None = None,
    ) -> None:
        """See `DPOptimizer.apply_private`; the printed prior takes the raw sum in besides."""
        if self.prior == "raw":
            both, half = sums, len(sums) // 2
            known = getattr(both, "clipping_set", None), getattr(both, "lot", None)
            sums, raw = sets.ClippedSums(both[:half], *known), both[half:]
        super().apply_private(sums, expected_lot_size, regularization_gradients)
        if self.prior == "raw":
            self._prior.update([g / tf.cast(expected_lot_size, tf.float32) for g in raw])

    def _observe(self, released, stddevs):
        if self.prior != "raw":
            self._prior.update(released, stddevs)
            self._keep_factors(self._next_factors())

    def _keep_factors(self, factors):
        factors = [r for of in factors for r in of]
        shapes = [tuple(r.shape) for r in factors]
        if shapes != self._factor_layout.shapes:
            raise ValueError(
                f"The prior {type(self._prior).__name__} has shapes {shapes}, and had "
                f"{self._factor_layout.shapes} when it was built: give the same every time."
            )
        for kept, r in zip(self._kept_factors, self._factor_layout.pack(factors), strict=True):
            kept.assign(r)

    def _next_factors(self):
        """Returns r of the next release, from the prior and other public facts. A hook.

        Per variable a tuple of factors, see `Prior.factors`.
        """
        return self._prior.factors()

    def event(self, law: SamplingLaw) -> dp_accounting.DpEvent:
        """Returns one Gaussian event of multiplier σ*; ε = ∞ with the printed prior."""
        self._require_noise_multiplier()
        if self.prior == "raw":
            return dp_accounting.NonPrivateDpEvent()
        return super().event(law)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        config = super().get_config()
        config.update(
            clipping=self.clipping,
            prior=keras.saving.serialize_keras_object(self.prior),
            warmup_steps=self.warmup_steps,
            local_clip_factor=self.local_clip_factor,
            prior_decay=self.prior_decay,
            prior_exponent=self.prior_exponent,
            local_clip_threshold=self.local_clip_threshold,
        )
        return config


class _WithRawSum(sets.ClippingSet):
    """A set whose sums are followed by the raw sums of the same gradients. Not private."""

    def __init__(self, clipping_set):
        self._clipping_set = clipping_set

    def clip(self, grads):
        return self._clipping_set.clip(grads)

    def noise_stddev(self, noise_multiplier, num_variables):
        return self._clipping_set.noise_stddev(noise_multiplier, num_variables)

    def clipped_sum(self, grads, mask):
        rows = [as_rows(g).materialize() for g in grads]
        finite = [tf.where(tf.math.is_finite(g), g, 0.0) for g in rows]
        raw = [tf.tensordot(mask, g, [[0], [0]]) for g in finite]
        return sets.ClippedSums([*self._clipping_set.clipped_sum(grads, mask), *raw], self)

    def zero_sums(self, shapes):
        return [*self._clipping_set.zero_sums(shapes), *super().zero_sums(shapes)]
