"""The recipe "Add a sampling law" of CONTRIBUTING.md, followed for a law that is made up here.

The law has nothing outside of this file: where a part of the package had to know it, a test below
would fail.
"""

import dataclasses
import math
from typing import ClassVar

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import ROWS, data, private_model
from tf_adadp.accounting import PrivacyLedger, SamplingLaw
from tf_adadp.accounting.laws import poisson_event
from tf_adadp.sampling import SampledLots
from tf_adadp.sampling.sampled import poisson_subset
from tf_adadp.sampling.sources import as_source
from tf_adadp.training.arguments import check_workers

# tf_adadp/accounting/laws/cyclic.py


@dataclasses.dataclass(frozen=True)
class CyclicPoissonSampling(SamplingLaw):
    """Each record enters lot t independently, with a probability that goes round a public cycle.

    Guarantee: neighbouring data sets differ by adding or removing one record, which moves the sum
    of one step by at most C: Poisson sampling, with the probability of that step. Lots are
    independent, so a pass round the cycle costs the composition of its steps. The first lot of a
    pass is charged for all of it; a pass that is broken off costs no more. Microbatched sums move
    by at most 2C.

    Args:
      num_examples: N ≥ 1.
      expected_sizes: the expected number of records in the lots of a pass, each in (0, N].
      declared: True where the user states the law.
    """

    num_examples: int
    expected_sizes: tuple[float, ...]
    declared: bool = False
    neighboring_relation: ClassVar = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE

    def __post_init__(self):
        self._check_num_examples_and_declared()
        sizes = tuple(float(size) for size in self.expected_sizes)  # JSON has lists
        if not sizes or not all(0 < size <= self.num_examples for size in sizes):
            raise ValueError(f"expected_sizes={sizes}: give numbers in (0, {self.num_examples}].")
        object.__setattr__(self, "expected_sizes", sizes)

    @property
    def probabilities(self) -> tuple[float, ...]:
        """The sampling probability of each lot of a pass."""
        return tuple(size / self.num_examples for size in self.expected_sizes)

    @property
    def lots_per_pass(self) -> int:
        """The length of the cycle."""
        return len(self.expected_sizes)

    @property
    def expected_lot_size(self) -> float:
        """The mean over the cycle, a public constant."""
        return sum(self.expected_sizes) / len(self.expected_sizes)

    def event(self, noise_multiplier: float, microbatched: bool = False) -> dp_accounting.DpEvent:
        """Returns the composition of Poisson-sampled Gaussians over a pass."""
        if not 0 <= noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be finite and ≥ 0, got {noise_multiplier}.")
        if noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        sigma = noise_multiplier / (2 if microbatched else 1)
        return dp_accounting.ComposedDpEvent([poisson_event(q, sigma) for q in self.probabilities])

    def covers_pass(self, event: dp_accounting.DpEvent) -> bool:
        """Tells whether the event is `event` of this law, for any noise."""
        if isinstance(event, dp_accounting.NonPrivateDpEvent):
            return True
        if not isinstance(event, dp_accounting.ComposedDpEvent):
            return False
        sigma = getattr(getattr(event.events[0], "event", event.events[0]), "noise_multiplier", 0)
        return event == self.event(sigma)

    def matches(self, sampling_event: dp_accounting.DpEvent) -> bool:
        """Tells whether the event is Poisson sampling with a probability of the cycle."""
        return (
            isinstance(sampling_event, dp_accounting.PoissonSampledDpEvent)
            and sampling_event.sampling_probability in self.probabilities
        )

    def _summary(self) -> str:
        return (
            f"cyclic Poisson sampling: each of {self.num_examples} records enters a lot "
            f"independently, with expected lot sizes {self.expected_sizes} in turn"
        )


# tf_adadp/sampling/cyclic.py


class CyclicPoissonLots(SampledLots, enforces_law=True):
    """Poisson lots whose expected size goes round a cycle; see `CyclicPoissonSampling`."""

    def __init__(self, x, y=None, expected_sizes=None, seed=None):
        source = as_source(x, y)
        super().__init__(source, CyclicPoissonSampling(len(source), expected_sizes), seed)

    def _indices(self, step):
        probability = self.law.probabilities[step % self.law.lots_per_pass]
        return poisson_subset(self._key.generator(step), self.num_examples, probability)


# Its tests.

DELTA = 1e-3
SIZES = (30.0, 60.0, ROWS)
LAW = CyclicPoissonSampling(ROWS, SIZES)
PASS = LAW.event(1.0)


def lots(kind=CyclicPoissonLots, **kwargs):
    return kind(*data(), expected_sizes=SIZES, **kwargs)


def epsilon_of_passes(passes):
    """Computed by dp_accounting alone."""
    accountant = dp_accounting.rdp.RdpAccountant()
    gaussian = dp_accounting.GaussianDpEvent(1.0)
    for q in (0.25, 0.5):
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, gaussian), passes)
    return accountant.compose(gaussian, passes).get_epsilon(DELTA)


@pytest.fixture(scope="module")
def trained():
    model = private_model()
    model.fit(lots(), epochs=2, steps_per_epoch=3, verbose=0)
    return model


def test_lots_have_the_sizes_of_the_cycle():
    sizes = np.array([[len(lots(seed=s)._indices(t)) for t in range(6)] for s in range(50)])
    assert (sizes[:, 2::3] == ROWS).all()
    deviation = sizes.mean(0) - np.tile(SIZES, 2)
    assert (np.abs(deviation) < 5 * math.sqrt(ROWS / 4 / 50)).all()


def test_fit_charges_a_pass_before_its_first_lot(trained):
    assert trained.epsilon(DELTA) == pytest.approx(epsilon_of_passes(2), rel=1e-6)
    entries = trained.ledger.entries
    assert {e.law for e in entries} == {LAW}
    assert sum(e.count for e in entries if e.event == PASS) == 2
    assert sum(e.count for e in entries if e.event == dp_accounting.NoOpDpEvent()) == 4


def test_the_entry_is_saved_and_loaded(trained, tmp_path):
    trained.ledger.save(tmp_path / "ledger.json")
    loaded = PrivacyLedger.load(tmp_path / "ledger.json")
    assert loaded.entries == trained.ledger.entries
    assert loaded.epsilon(DELTA) == trained.epsilon(DELTA)
    statement = loaded.statement(DELTA)
    assert "cyclic Poisson sampling: each of 120 records" in " ".join(statement.split())


def test_a_private_state_continues_its_lots(trained, tmp_path):
    trained.save_weights(tmp_path / "w.weights.h5")
    trained.save_private_state(tmp_path / "state")
    model = private_model()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "w.weights.h5")
    model.load_private_state(tmp_path / "state")
    with pytest.raises(ValueError, match="continues lots of cyclic Poisson sampling"):
        model.fit(lots(seed=1), steps_per_epoch=3, verbose=0)  # no secret key
    continued = lots()
    budget = dp.PrivacyCallback(target_delta=DELTA, max_epsilon=epsilon_of_passes(4))
    history = model.fit(continued, epochs=9, steps_per_epoch=3, verbose=0, callbacks=[budget])
    assert history.history["epsilon"][0] == pytest.approx(epsilon_of_passes(3), rel=1e-6)
    assert model.epsilon(DELTA) <= budget.max_epsilon
    assert continued.step == 6 + 27  # reserved


def test_it_is_refused_where_it_claims_nothing():
    x, y = data()
    strategy = tf.distribute.get_strategy()
    with pytest.raises(ValueError, match="CyclicPoissonLots on several hosts"):
        check_workers(strategy, lots(), 1, 1)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(30)
    with pytest.raises(TypeError, match="give a PoissonSampling"):
        dp.DeclaredLots(dataset, LAW)
    with pytest.raises(TypeError, match="give a PoissonSampling"):
        private_model().train_on_batch(x[:30], y[:30], law=LAW)
    with pytest.raises(ValueError, match="cost of a selection under this sampling is not known"):
        dp.accounting.selection_event(LAW, 1.0)
    with pytest.raises(ValueError, match="give a PoissonSampling"):
        dp.SADPSGD(noise_multiplier=1.0, energy_data=data()).epsilon_as_published(LAW, DELTA)


def test_other_releases_are_not_charged_once_a_pass():
    both = dp_accounting.ComposedDpEvent([PASS, dp_accounting.GaussianDpEvent(3.0)])
    for event in (both, dp_accounting.GaussianDpEvent(1.0), dp_accounting.ZCDpEvent(0.1)):
        with pytest.raises(ValueError, match="cannot be charged once for a pass"):
            LAW.charges(event, 3)


def test_lots_that_do_not_say_that_they_enforce_it_are_declared():
    class Others(CyclicPoissonLots):
        pass

    assert lots().law == LAW
    assert lots(Others).law == dataclasses.replace(LAW, declared=True)


def test_a_law_keeps_its_name():
    with pytest.raises(TypeError, match="there is a sampling law PoissonSampling"):

        class PoissonSampling(SamplingLaw):
            pass
