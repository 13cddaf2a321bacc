"""Families of trade-off functions, one for each amount of noise: Gaussian ones, and a claim's."""

import functools
import json
import math
from collections.abc import Callable

import dp_accounting
import numpy as np
from scipy import special

from tf_adadp.accounting.accountants import Composition
from tf_adadp.accounting.bounds import gaussian_dp
from tf_adadp.accounting.composing import compose
from tf_adadp.accounting.events import decode_event
from tf_adadp.accounting.ledger import PrivacyLedger

_LINES = 200  # tangents that a claim's trade-off function is made of
_LEAST_DELTA = 1e-10  # of the steepest
_LARGEST_EPSILON = 500.0
TradeOff = Callable[[np.ndarray], np.ndarray]  # f(α), the least type II error at type I error α


class Family:
    """Describes trade-off functions f_k, one for each noise 2^(k/steps) times that of f_0.

    Subclasses have `steps`, `octaves`, the range of log2 of the noise, `trade_off(k)`, symmetric,
    convex and never too large, and `_epsilon(k, delta)`.
    """

    def scale(self, k: int) -> float:
        """Returns the noise of f_k as a multiple of that of f_0."""
        return 2.0 ** (k / self.steps)

    def least_refuted(self, refuted: Callable[[TradeOff], bool]) -> int | None:
        """Finds the least k with `refuted(f_k)`, or None; all k above are refuted, too."""
        lowest, highest = (octave * self.steps for octave in self.octaves)
        down = refuted(self.trade_off(0))
        yes, no, stride = (0, None, -1) if down else (None, 0, 1)
        while yes is None or no is None:
            last = no if yes is None else yes
            if last == (lowest if down else highest):
                return yes
            k = min(max(last + stride, lowest), highest)
            yes, no = (k, no) if refuted(self.trade_off(k)) else (yes, k)
            stride *= 2
        while yes - no > 1:
            k = (yes + no) // 2
            yes, no = (k, no) if refuted(self.trade_off(k)) else (yes, k)
        return yes

    def epsilon(self, k: int | None, delta: float) -> float:
        """Returns ε at δ of f_k; 0 for None."""
        return 0.0 if k is None else float(self._epsilon(k, delta))


class GaussianFamily(Family):
    """Describes f(α) = Φ(Φ⁻¹(1 − α) − μ), with noise 1/μ."""

    steps, octaves = 512, (-6, 12)

    def trade_off(self, k: int) -> TradeOff:
        """Returns f_k."""
        mu = 1 / self.scale(k)
        return lambda alpha: special.ndtr(-special.ndtri(alpha) - mu)

    def _epsilon(self, k, delta):
        return gaussian_dp.epsilon_of_mu(1 / self.scale(k), delta)


class ClaimFamily(Family):
    """Scales all noise multipliers of a claim's releases; see `law_epsilon_lower_bound`.

    Args:
        claim: a `PrivacyLedger` or a `DpEvent`.
        relation: the neighbouring relation that the claim has to be stated for; None for any.

    Raises:
        ValueError: no releases, a non-private one, an event that "pld" cannot analyse, another
            relation.
    """

    steps, octaves = 64, (-2, 10)

    def __init__(
        self,
        claim: PrivacyLedger | dp_accounting.DpEvent,
        relation: dp_accounting.NeighboringRelation | None = None,
    ) -> None:
        if isinstance(claim, PrivacyLedger):
            composition = compose(claim.entries, claim.unknown_reasons)
        elif isinstance(claim, dp_accounting.DpEvent):
            composition = Composition.of([(claim, 1)])
        else:
            raise ValueError(f"claim={claim!r}: give a PrivacyLedger or a dp_accounting.DpEvent.")
        if relation not in (None, composition.relation):
            raise ValueError(
                f"claim is for {composition.relation.name}, canaries are for {relation.name}."
            )
        epsilon = _epsilon_of(composition, 1e-5)
        if not 0 < epsilon < math.inf:
            raise ValueError(
                f"claim has epsilon={epsilon}: give releases that are private and cost something."
            )
        self._composition = composition

    def trade_off(self, k: int) -> TradeOff:
        """Returns f_k."""
        return _trade_off_of(self._scaled(k))

    def _epsilon(self, k, delta):
        return _epsilon_of(self._scaled(k), delta)

    def _scaled(self, k):
        def scaled(fields):
            if "noise_multiplier" in fields:
                fields["noise_multiplier"] *= self.scale(k)
            return fields

        charges = self._composition.charges
        return Composition.of(
            [(decode_event(json.loads(key, object_hook=scaled)), count) for key, count in charges],
            self._composition.relation,
        )


@functools.lru_cache(maxsize=256)
def _epsilon_of(composition, delta):
    return composition.epsilon(delta, "pld")


@functools.lru_cache(maxsize=256)
def _trade_off_of(composition):
    """Returns f of a composition, by tangents at ε from 0 to where δ vanishes; takes a second."""
    top = min(composition.epsilon(_LEAST_DELTA, "pld"), _LARGEST_EPSILON)
    epsilons = np.linspace(0, top, _LINES)
    rest = 1 - np.array([composition.delta(epsilon, "pld") for epsilon in epsilons])
    growth = np.exp(epsilons)

    def trade_off(alpha):
        alpha = np.asarray(alpha)[..., None]
        lines = np.maximum(rest - growth * alpha, (rest - alpha) / growth)
        return np.maximum(lines.max(axis=-1), 0.0)

    return trade_off
