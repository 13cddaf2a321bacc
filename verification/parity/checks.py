"""States which differences are allowed between the two sides, and why."""

import collections
import math
import typing

import numpy as np

from verification.parity import cases

# Double precision: the same formulas, summed in another order or by another SciPy.
_DOUBLE = 1e-9
_SAME = (-_DOUBLE, _DOUBLE)
# Never dearer by rounding alone, never cheaper at all: for bounds of which one is the looser.
_NOT_BELOW = (-_DOUBLE, math.inf)
# Float32: entries of a mean of vectors of norm 2.5 at most, weights near 1, whose sums run in
# another order on each side; the norm bound of the ghost engine is a few roundings above the norm.
_GRADIENT = 1e-6
_WEIGHTS = 2e-6
# Adam divides by |g| + 1e-7 at first, which turns the rounding of a small gradient into a share of
# the learning rate, 0.01: a thousandth of it.
_ADAM_WEIGHTS = 1e-5


class Check(typing.NamedTuple):
    """Signed differences of many numbers, and what is allowed.

    Attributes:
        what: what is compared with what.
        numbers: how many.
        least, greatest: of the differences.
        allowed: the two ends between which they must lie.
        unit: "relative" to the other side's figure, or "absolute".
    """

    what: str
    numbers: int
    least: float
    greatest: float
    allowed: tuple[float, float]
    unit: str

    @property
    def holds(self):
        """Tells whether every difference is allowed. NaN is not."""
        return self.allowed[0] <= self.least and self.greatest <= self.allowed[1]


def relative(what, ours, theirs, allowed):
    """A check of ours/theirs − 1."""
    ours, theirs = _arrays(ours, theirs)
    return _check(what, ours / theirs - 1, allowed, "relative")


def absolute(what, ours, theirs, tolerance):
    """A check of ours − theirs, either way."""
    ours, theirs = _arrays(ours, theirs)
    return _check(what, ours - theirs, (-tolerance, tolerance), "absolute")


def _arrays(ours, theirs):
    ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
    if ours.shape != theirs.shape or not ours.size:
        raise ValueError(f"{ours.shape} numbers of ours for {theirs.shape} of theirs.")
    return ours, theirs


def _check(what, differences, allowed, unit):
    least, greatest = float(np.min(differences)), float(np.max(differences))
    return Check(what, differences.size, least, greatest, allowed, unit)


def accounting_checks(ours, ours_there, peer):
    """Compares ε and noise multipliers.

    Args:
        ours: `accounting_figures.figures` in this package's environment.
        ours_there: the same in tensorflow-privacy's, on the dp_accounting it brings.
        peer: tensorflow-privacy's figures, `run_tf_privacy.accounting_figures_of_peer`.
    """
    sample = np.array(ours_there["epsilon"])[[cases.GRID.index(t) for t in cases.SAMPLE]]
    targets = [budget.target_epsilon for budget in cases.BUDGETS]
    return [
        relative("ε, RDP, same dp_accounting", ours_there["epsilon"], peer["epsilon"], _SAME),
        relative("ε, PLD, same dp_accounting", ours_there["pld"], peer["pld"], _SAME),
        relative(
            "ε, microbatches, full and fixed lots, same dp_accounting",
            ours_there["other_lots"],
            peer["other_lots"],
            _SAME,
        ),
        absolute("ε as its statement prints it, 3 places", sample, peer["printed"], 0.5001e-3),
        # Its orders are fewer, three of them none of ours.
        relative("ε of compute_dp_sgd_privacy", sample, peer["deprecated"], (-0.2, 0.01)),
        *main_epsilon_checks(ours, peer),
        *_renyi_checks(ours["renyi"], ours_there["renyi"]),
        relative(
            "σ, same dp_accounting, calibrate_dp_mechanism",
            ours_there["noise_multiplier"],
            peer["noise_multiplier"],
            # Its tolerance is 1e-6 of σ, ours 1e-3 of ε on the side of more noise.
            (-2e-6, 1e-3),
        ),
        *main_noise_checks(ours, peer),
        relative("its ε of our σ over the target", peer["price"], targets, (-3e-3, 0.0)),
    ]


def main_epsilon_checks(ours, peer):
    """ε of this package's environment, whose dp_accounting bounds fractional orders from above."""
    mine, theirs = np.array(ours["epsilon"]), np.array(peer["epsilon"])
    usual = theirs <= 10
    return [
        relative("ε ≤ 10, RDP", mine[usual], theirs[usual], (-_DOUBLE, 5e-3)),
        relative("ε > 10, RDP", mine[~usual], theirs[~usual], _NOT_BELOW),
        relative("ε, PLD", ours["pld"], peer["pld"], _SAME),
        relative(
            "ε, microbatches, full and fixed lots", ours["other_lots"], peer["other_lots"],
            _NOT_BELOW,
        ),
    ]  # fmt: skip


def main_noise_checks(ours, peer):
    """Noise multipliers of this package's environment."""
    mine = ours["noise_multiplier"]
    return [
        relative("σ, calibrate_dp_mechanism", mine, peer["noise_multiplier"], (-2e-6, 2e-3)),
        # Fewer orders make it ask for more noise.
        relative("σ of compute_noise", mine, peer["compute_noise"], (-0.05, 1e-3)),
    ]


def _renyi_checks(here, there):
    orders = np.array(cases.ORDERS)
    whole = orders == np.round(orders)
    here, there = np.array(here), np.array(there)
    return [
        relative("Rényi bound, whole orders", here[:, whole], there[:, whole], _SAME),
        relative("Rényi bound, fractional orders", here[:, ~whole], there[:, ~whole], _NOT_BELOW),
    ]


def training_checks(ours, peer):
    """Compares noiseless gradients and trained weights: one check per implementation and kind.

    Args:
        ours: `run_tf_adadp.training_figures`.
        peer: `run_tf_privacy.training_figures`, of the same models or more.
    """
    pairs = collections.defaultdict(list)
    for model, mine in ours.items():
        for implementation, theirs in peer[model].items():
            if "gradient" in theirs:
                for found in mine["gradients"].values():
                    pairs[implementation, "clipped mean gradients", _GRADIENT].append(
                        (found, theirs["gradient"])
                    )
            for optimizer, weights in theirs["weights"].items():
                adam = optimizer == "adam"
                kind = "weights, Adam" if adam else "weights, SGD"
                tolerance = _ADAM_WEIGHTS if adam else _WEIGHTS
                for index in (0, -1):
                    steps = "1 step" if index == 0 else f"{cases.STEPS} steps"
                    pairs[implementation, f"{kind}, {steps}", tolerance].append(
                        (mine["weights"][optimizer][index], weights[index])
                    )
    return [
        absolute(
            f"{implementation}: {kind}", *map(np.concatenate, zip(*found, strict=True)), tolerance
        )
        for (implementation, kind, tolerance), found in pairs.items()
    ]
