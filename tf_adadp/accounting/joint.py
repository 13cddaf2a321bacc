"""Combines several Gaussian releases from the same records into one."""

import math

from tf_adadp.utils.checks import check_noise_multiplier


def joint_noise_multiplier(*noise_multipliers: float) -> float:
    """Returns (Σ σ_i⁻²)^(−1/2), the noise multiplier of all the releases together.

    Sums of noise multipliers σ_i, each divided by the standard deviation of its noise, are one
    vector with noise N(0, I) and a sensitivity of at most (Σ σ_i⁻²)^(1/2). So they are one Gaussian
    mechanism, even if an earlier release decides the next sum (Dong, Roth and Su, "Gaussian
    Differential Privacy", arXiv:1905.02383, Corollary 3.3). Releases from the same LOT share its
    sampling: two releases from a Poisson lot are one PoissonSampled(q, Gaussian(σ)) of this σ, and
    not the composition of two.

    Args:
      *noise_multipliers: at least one number ≥ 0. A release without noise makes it 0.

    Raises:
      ValueError: there is none, or one is negative or not finite.

    Example:
        >>> round(accounting.joint_noise_multiplier(4.0, 20.0), 3)
        3.922
    """
    if not noise_multipliers:
        raise ValueError("noise_multipliers must hold at least one number.")
    multipliers = [check_noise_multiplier(value) for value in noise_multipliers]
    if 0 in multipliers:
        return 0.0
    return 1.0 / math.hypot(*(1.0 / value for value in multipliers))
