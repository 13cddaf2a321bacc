"""How users charge an optimizer: methods that ask its `Charges`."""

import contextlib
from collections.abc import Iterator
from typing import ClassVar

from tf_adadp.accounting import PrivacyLedger, SamplingLaw
from tf_adadp.charging.charges import Charges


class Charged:
    """Mixin of `DPOptimizer`: what was charged and released, by `charging.charges.Charges`.

    Attributes:
        charges: the `Charges` of this optimizer.
    """

    charges: Charges
    covers_metrics: ClassVar[bool] = True

    @property
    def ledger_origin(self) -> str:
        """The origin in the entries of a ledger, but for released metrics."""
        return type(self).__name__

    @property
    def metrics_noise_multiplier(self) -> float | None:
        """σ_m of the metrics that every step releases from its lot and `event` covers, or None."""
        return self.charges.metrics_noise_multiplier

    def charge(
        self,
        ledger: PrivacyLedger,
        law: SamplingLaw,
        steps: int = 1,
        *,
        position: int = 0,
        reproducible_sampling: bool = False,
        releases_per_lot: int = 1,
    ) -> None:
        """Writes `steps` releases on lots drawn by `law` into a ledger, before they are made.

        `DPModel.fit` and `tf_adadp.private_step` charge by themselves; custom loops call it ahead
        of `apply_private`. The weights remember the ledger: a DPModel that has them, now or later,
        reports all its entries, too.

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

    @contextlib.contextmanager
    def charged(
        self,
        ledger: PrivacyLedger,
        law: SamplingLaw,
        steps: int,
        *,
        position: int = 0,
        reproducible_sampling: bool = False,
    ) -> Iterator[None]:
        """Charges `steps` releases, to be made inside the `with` block.

        A charge whose release was not made, after an error, stays in the ledger and expires here:
        it does not pay for a later release. Releases beyond `steps` stay uncharged.
        """
        self.charge(
            ledger, law, steps, position=position, reproducible_sampling=reproducible_sampling
        )
        with self.charges.expiring(steps):
            yield

    @property
    def releases(self) -> int:
        """The number of releases that this process made, charged or not."""
        return self.charges.releases

    @property
    def uncharged_releases(self) -> int:
        """The number of releases that this process made and no `charge` paid for."""
        return self.charges.uncharged
