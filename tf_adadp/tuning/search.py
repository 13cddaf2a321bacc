"""A search whose number of trials is random, and of which the winner alone is released."""

import dataclasses
import gc
import math
import random
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.accounting.trials import check_mean_trials
from tf_adadp.model import DPModel
from tf_adadp.tuning.quiet import FreshStart, quiet, show
from tf_adadp.tuning.trial import TrialCheck, TrialCost
from tf_adadp.utils.checks import (
    check_delta,
    check_instance,
    check_integer,
    check_target_epsilon,
    check_text,
)

_ALL_FAILED = (
    "Every trial failed; the error above is that of one of them. Try `train` and `score` once by "
    "themselves. The search is charged all the same: give the next one on the same records the "
    "`ledger` of this error, search(ledger=error.ledger)."
)


@dataclasses.dataclass(frozen=True)
class Winner:
    """The best trial of a search.

    Attributes:
        model: the trained `DPModel`; its ledger is charged for the whole search.
        hyperparameters: those that it was trained with.
        score: its score.

    Example:
        >>> model = dp.DPModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        >>> dp.tuning.Winner(model, {"l2_norm_clip": 0.3}, score=0.9).hyperparameters
        {'l2_norm_clip': 0.3}
    """

    model: DPModel
    hyperparameters: dict[str, Any]
    score: float


def search(
    train: Callable[[dict[str, Any]], DPModel],
    space: Mapping[str, Any],
    planned: PrivacyLedger,
    *,
    mean_trials: float,
    score: Callable[[DPModel], float],
    score_data: str,
    ledger: PrivacyLedger | None = None,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    seed: int | None = None,
) -> Winner:
    """Trains a random number of models, releases the best one alone, and charges the search.

        planned = dp.PrivacyLedger()
        optimizer(clip=1.0).charge(planned, law, steps=100)      # the cost of one trial
        best = dp.tuning.search(
            train,                                               # {"clip": 0.3} -> a DPModel
            {"clip": [0.1, 0.3, 1.0, 3.0], "rate": scipy.stats.loguniform(0.01, 1)},
            planned,
            mean_trials=10,
            score=lambda model: model.evaluate(x_val, y_val, return_dict=True)["accuracy"],
            score_data="1,000 held-out records",
        )
        best.model.epsilon(1e-5)                                 # of the whole search

    Every trial draws hyper-parameters from the space, trains a model and scores it; then the search
    ends with probability 1/mean_trials. So the number K of trials is geometric, and at least 1.

    Guarantee: model, hyper-parameters and score of the winner satisfy the ε that its ledger
    reports, by `accounting.search_event`: the Rényi bound of Papernot and Steinke (2022),
    Theorem 2 with η = 1, for the neighbouring relation, unit and sampling of the planned
    releases. It asks for

    - independent trials: `train` builds a new model, with its own noise and lots. A trial that goes
      on from another trial is refused. Python's, NumPy's and TensorFlow's generators are seeded
      anew before every trial and after the search.
    - one cost: no trial may release more than `planned`. A trial is checked before anything of it
      is used; a lower cost at every Rényi order is fine (fewer steps, more noise).
    - a secret K: it is drawn from the operating system's entropy. Output, logs and warnings of
      trials are dropped, except the winner's warnings. NOT hidden: the running time, and files that
      `train` writes, such as TensorBoard logs. Do not publish either. Names of functions in a
      SavedModel tell K only where all trials trace more than four million of them.

    NOT covered: the records that `score` reads, unless they are public. Held-out private records
    are not training records, and a winner that is chosen by them is a statistic of them. A score
    of raw training records would break the guarantee: it has to follow from the model and from
    other data alone.

    A trial that raises an exception, or whose score is NaN, has the worst score, and counts; what
    it released until then has to be within `planned`, too.

    Args:
        train: {name: value} ↦ a `DPModel` that it built, compiled and trained. It is called in this
            process, one trial after the other.
        space: {name: sequence of values, drawn uniformly; or a distribution with
            `rvs(random_state=…)`, as those of scipy.stats}. It is public, choose it without
            looking at the records.
        planned: the largest cost of one trial, by one sampling law. It is only read.
            `optimizer.charge(planned, law, steps)` of an optimizer like those of the trials writes
            it.
        mean_trials: the mean number of trials, finite and ≥ 1.
        score: model ↦ a number, the greater the better.
        score_data: the data of the score, in words. Every privacy statement quotes it.
        ledger: earlier releases about these records, e.g. by DPPCA. It is charged for the
            search before the first trial and becomes the winner's. None for a new one. Where the
            search raises, it has been charged.
        target_epsilon, target_delta: a budget for everything in the ledger, search included, with
            the "rdp" accountant. None for no budget.
        seed: for tests only: an int that K, hyper-parameters and global generators follow from. The
            ledger says that there is no guarantee against those who know it.

    Raises:
        TypeError, ValueError: before anything is trained or charged, on an argument out of range, a
            plan whose cost depends on outcomes (AGD) or has no Rényi bound (truncated lots), or a
            budget that has no room. Afterwards, on a trial that is not as planned, whatever its
            score: nothing is released.
        RuntimeError: every trial failed; its `ledger` is charged for the search.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=100, expected_size=20)
        >>> planned = dp.PrivacyLedger()
        >>> planned.add(law.event(4.0), 5, law=law)
        >>> def train(hyperparameters):
        ...     model = dp.DPModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        ...     optimizer = dp.DPSGD(noise_multiplier=4.0, **hyperparameters)
        ...     model.compile(optimizer, "mse", log_raw_metrics=False)
        ...     model.fit(np.ones((100, 4)), np.ones((100, 1)), batch_size=20, verbose=0)
        ...     return model
        ...
        >>> best = dp.tuning.search(
        ...     train,
        ...     {"l2_norm_clip": [0.3, 1.0, 3.0]},
        ...     planned,
        ...     mean_trials=2,
        ...     score=lambda model: -model.evaluate(np.ones((10, 4)), np.ones((10, 1)), verbose=0),
        ...     score_data="10 public records",
        ...     seed=0,
        ... )
        >>> best.hyperparameters["l2_norm_clip"] in (0.3, 1.0, 3.0)
        True
    """
    cost, mean_trials = TrialCost.of(planned), check_mean_trials(mean_trials)
    check_text("score_data", score_data, 'what data the score reads, e.g. "360 held-out digits"')
    for name, function in (("train", train), ("score", score)):
        if not callable(function):
            raise TypeError(f"{name}={function!r}: give a function.")
    wanted = "the PrivacyLedger of what was released before, or None"
    check_instance("ledger", ledger, PrivacyLedger | None, wanted)
    if seed is not None:
        check_integer("seed", seed, "an integer, for tests only, or None", at_least=0)
    rng = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
    coin = random.SystemRandom() if seed is None else random.Random(seed)
    _draw(space, np.random.default_rng(0))  # raises if it cannot be drawn from
    ledger = PrivacyLedger(planned.dataset) if ledger is None else ledger
    check_trial = TrialCheck(cost, ledger, seeded=seed is not None)
    event, names = cost.search_event(mean_trials), {planned.dataset} - {None}
    _check_room(ledger, event, cost.law, names, target_epsilon, target_delta)
    ledger.add(
        event,
        law=cost.law,
        origin=f"search, scored on {score_data}",
        reproducible_noise=seed is not None or any(e.reproducible_noise for e in planned.entries),
    )

    best, best_gaps, best_warnings, first_error = None, (), [], None
    start = FreshStart(rng)
    try:
        while True:
            start.begin()
            hyperparameters = _draw(space, rng)
            with quiet() as caught:
                model, value, error = _try(train, score, hyperparameters)
                gaps = () if model is None else check_trial(model)
            first_error = first_error or error
            if error is None and (best is None or value > best.score):
                best, best_gaps, best_warnings = Winner(model, hyperparameters, value), gaps, caught
                start.keep_names()
            if model is not None:
                del model
                gc.collect()  # Keras's models are cycles
            if coin.random() < 1 / mean_trials:
                break
    finally:
        start.end()
    if best is None:
        failed = RuntimeError(_ALL_FAILED)
        failed.ledger = ledger
        raise failed from first_error
    for reason in best_gaps:
        ledger.mark_not_covered(reason)
    best.model._history.paid_by(ledger)
    show(best_warnings)
    return best


def _try(train, score, hyperparameters):
    """Returns a trial's model, score and error; the model is None where `train` failed."""
    try:
        model = train(dict(hyperparameters))
    except Exception as error:
        return None, None, error
    check_instance("what train returned", model, DPModel, "the DPModel that it trained")
    try:
        value = float(score(model))
        if math.isnan(value):
            raise ValueError("the score is NaN.")
    except Exception as error:
        return model, None, error
    return model, value, None


def _draw(space, rng):
    """Draws hyper-parameters, {name: value}."""
    check_instance("space", space, Mapping, "a mapping {name: values or a distribution}")
    drawn = {}
    for name, values in space.items():
        if hasattr(values, "rvs"):
            drawn[name] = values.rvs(random_state=rng)
        elif isinstance(values, list | tuple | range | np.ndarray) and len(values):
            drawn[name] = values[int(rng.integers(len(values)))]
        else:
            raise ValueError(
                f"space[{name!r}]={values!r}: give a non-empty list of values, or a distribution "
                "with rvs, e.g. scipy.stats.loguniform(0.01, 1)."
            )
    return drawn


def _check_room(ledger, event, law, names, target_epsilon, target_delta):
    """Refuses a search that does not add up with the ledger, or that its budget has no room for."""
    ledger.check_data(names, [(law.unit, law.num_units)], whose="the search")
    ledger.check_adds_up(event, law)
    if (target_epsilon is None) != (target_delta is None):
        raise ValueError(
            f"target_epsilon={target_epsilon} with target_delta={target_delta}: a budget is both, "
            "e.g. target_epsilon=2.0, target_delta=1e-5."
        )
    if target_epsilon is not None:
        bound, delta = check_target_epsilon(target_epsilon), check_delta(target_delta)
        after = ledger.preview(event, 1, delta, law=law)
        if after > bound:
            raise ValueError(
                f"target_epsilon={bound} at target_delta={delta:g} has no room for this search: "
                f"epsilon={ledger.epsilon(delta):.5g} is spent, and it would bring that to "
                f"{after:.5g} (mean_trials={event.mean:g}). Nothing was trained or charged. Lower "
                "mean_trials or the steps of a trial, or raise its noise."
            )
