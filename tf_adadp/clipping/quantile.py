"""A clip norm that need not be chosen: it follows a quantile of the gradients' norms."""

from typing import Any

import keras
import tensorflow as tf

from tf_adadp.utils.checks import check_number

# The range that float32 can square, with room for the scales of an ellipsoid.
_SMALLEST_NORM, _LARGEST_NORM = 1e-6, 1e6


@keras.saving.register_keras_serializable(package="tf_adadp")
class QuantileClip:
    """Adapts the clip norm C until a given share of the examples is left unclipped.

        b̃ = (Σ_x (1[‖g_x‖ ≤ C] − ½) + N(0, σ_b²)) / L + ½       released beside the gradient
        C ← C · exp(−η_C · (b̃ − γ)),   b̃ pulled into [0, 1]

    (Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping", Algorithm 1.)
    Give it as the clip norm of an optimizer that has one: `dp.ADADP(l2_norm_clip=
    dp.QuantileClip(), noise_multiplier=1.0)`. ‖·‖ is the norm that the optimizer clips by: of the
    whole gradient, for an ellipsoid in the metric of its shape, of a microbatch's mean gradient
    where microbatches are clipped.

    Guarantee: that of the optimizer at its noise_multiplier σ*, under every sampling law. The
    count is one more coordinate of the vector that a step releases, in which an example contributes
    ±½, a record more or less moves it by ½, and one replaced, or a microbatch changed, by 1. With
    the share ρ of the step's budget for it,

        σ_b = σ* / (2·√ρ),   noise of the sum = σ*·C / √(1 − ρ),   so that
        ‖Δ sum‖²/(noise of the sum)² + (½)²/σ_b² ≤ (1 − ρ)/σ*² + ρ/σ*² = 1/σ*²

    which is rule (R) of `tf_adadp.clipping` for the two together (`RowsBeside`): one Gaussian
    mechanism of multiplier σ*, and nothing further to charge. C follows from releases alone.

    Args:
        quantile: γ in (0, 1), the share of examples to leave unclipped.
        initial_norm: C of the first step, in [1e-6, 1e6]. It may be far off: C moves by a factor
            of up to exp(η_C·max(γ, 1 − γ)) at every step, 1.1 at the defaults.
        learning_rate: η_C in (0, 10].
        budget_share: ρ in [1e-6, 0.5]. At 0.01 the sum has 0.5 % more noise than without.

    Raises:
        ValueError: on an argument that is out of range.

    Example:
        >>> dp.DPSGD(1.0, l2_norm_clip=dp.QuantileClip(0.5), noise_multiplier=1.1).l2_norm_clip
        QuantileClip(quantile=0.5, initial_norm=1.0, learning_rate=0.2, budget_share=0.01)
    """

    def __init__(
        self,
        quantile: float = 0.5,
        *,
        initial_norm: float = 1.0,
        learning_rate: float = 0.2,
        budget_share: float = 0.01,
    ):
        self._quantile = check_number("quantile", quantile, above=0, below=1)
        self._initial_norm = check_number(
            "initial_norm", initial_norm, at_least=_SMALLEST_NORM, at_most=_LARGEST_NORM
        )
        self._learning_rate = check_number("learning_rate", learning_rate, above=0, at_most=10)
        self._budget_share = check_number("budget_share", budget_share, at_least=1e-6, at_most=0.5)

    @property
    def initial_norm(self) -> float:
        """Returns C of the first step."""
        return self._initial_norm

    @property
    def budget_share(self) -> float:
        """Returns ρ, the share of a step's budget that the count takes."""
        return self._budget_share

    def next_norm(self, norm: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """Returns C of the next step.

        Args:
            norm: C of this one.
            count: the released count over L, b̃ − ½.
        """
        # A share, however large the noise of a small lot is.
        unclipped = tf.clip_by_value(count + 0.5, 0.0, 1.0)
        factor = tf.exp(-self._learning_rate * (unclipped - self._quantile))
        return tf.clip_by_value(norm * factor, _SMALLEST_NORM, _LARGEST_NORM)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            "quantile": self._quantile,
            "initial_norm": self._initial_norm,
            "learning_rate": self._learning_rate,
            "budget_share": self._budget_share,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QuantileClip":
        """Builds it from the result of `get_config`."""
        return cls(**config)

    def __repr__(self):
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"QuantileClip({arguments})"
