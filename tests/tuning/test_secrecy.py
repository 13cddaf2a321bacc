"""A search tells nothing but its winner: not the number of trials, not the losers."""

import collections
import gc
import json
import logging
import math
import os
import re
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy.stats import binom, chisquare

import tf_adadp as dp
from tests.helpers import ROWS, data, plain_model, private_model
from tf_adadp.utils.keras_compat import function_number

X, Y = data()
STEPS = 2
LAW = dp.accounting.PoissonSampling(ROWS, 30)


def plan():
    planned = dp.PrivacyLedger()
    dp.DPSGD(0.1, noise_multiplier=1.0).charge(planned, LAW, STEPS)
    return planned


def train(hyperparameters):
    model = private_model(dp.DPSGD(0.1, noise_multiplier=1.0))
    model.fit(X, Y, batch_size=30, steps_per_epoch=STEPS)  # prints its progress
    return model


def search(train, mean_trials, score=lambda model: 0.0, **arguments):
    return dp.tuning.search(
        train,
        {"number": range(100)},
        plan(),
        mean_trials=mean_trials,
        score=score,
        score_data="nothing",
        **arguments,
    )


def trials_of(mean_trials, seed=None):
    """The number of trials of a search, all of which fail."""
    calls = []

    def fail(hyperparameters):
        calls.append(hyperparameters)
        raise ValueError("a trial")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tf_adadp.tuning.quiet._FUNCTION_NUMBERS", 0)  # half a second each
        with pytest.raises(RuntimeError):
            search(fail, mean_trials, seed=seed)
    return len(calls)


@pytest.mark.extended
@pytest.mark.parametrize("searches", [300, pytest.param(2500, marks=pytest.mark.nightly)])
def test_the_number_of_trials_is_geometric(searches):
    """Chi-square over seeded searches; of a true law one set of seeds in 1000 would fail.

    The longer one sees a probability of ending that is 15 % too large.
    """
    mean = 3
    found = collections.Counter(trials_of(mean, seed) for seed in range(searches))
    chances = [(1 - 1 / mean) ** (k - 1) / mean for k in range(1, 8)]
    expected = [searches * p for p in [*chances, 1 - sum(chances)]]
    observed = [found[k] for k in range(1, 8)]
    observed.append(searches - sum(observed))
    assert chisquare(observed, expected).pvalue > 1e-3


def test_without_a_seed_the_number_comes_from_the_system(monkeypatch):
    """The global generators have no say: a false alarm once in 10^9 runs."""
    counts = []
    for _ in range(60):
        keras.utils.set_random_seed(7)
        counts.append(trials_of(2))
    # P(K = 1) = 1/2: both the number of ones and that of others is within its 1e-9 quantiles.
    ones = counts.count(1)
    assert binom.ppf(5e-10, 60, 0.5) <= ones <= binom.ppf(1 - 5e-10, 60, 0.5)
    assert len(set(counts)) > 1


def test_one_trial_where_the_mean_is_one():
    assert {trials_of(1) for _ in range(20)} == {1}


# What an observer sees


def everything(model, folder, number):
    """Returns the content of the winner's files and objects, without its own random draws.

    Functions are numbered from that of TensorFlow before the search on.
    """
    model.save(folder / "winner.keras")
    ledger = json.loads(model.ledger.to_json())["ledger"]
    for entry in ledger["entries"]:
        entry["id"] = "random"
    model.export(folder / "exported", verbose=False)
    exported = (folder / "exported" / "saved_model.pb").read_bytes()
    functions = {int(n) - number for n in re.findall(rb"__inference_[a-z_]+_(\d+)", exported)}
    return {
        "functions": sorted(functions),
        "config": json.dumps(model.get_config(), default=str, sort_keys=True),
        "compiled": json.dumps(model.get_compile_config(), default=str, sort_keys=True),
        "names": [model.name, model.model.name, model.optimizer.name]
        + [v.path for v in [*model.weights, *model.optimizer.variables]],
        "ledger": ledger,
        "statement": model.ledger.statement(1e-5),
        "history": sorted(model.history.history),
        "counters": [int(model.optimizer.iterations), model.optimizer.releases],
        "plain": dp.DPModel(plain_model()).get_config(),  # a model that is made afterwards
        "epsilon": model.epsilon(1e-5),
    }


@pytest.mark.representative(1)
@pytest.mark.parametrize("trials", [3, pytest.param(7, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("best_of", [min, max])
def test_one_trial_and_many_look_the_same(best_of, trials, tmp_path, capfd, caplog, monkeypatch):
    """Searches of 1 trial and of several, the first or last of which wins, leave equal traces."""
    seen = []
    keras.utils.clear_session()
    for number in (1, trials):
        coins = iter([1.0] * (number - 1) + [0.0])
        monkeypatch.setattr("random.SystemRandom.random", lambda self, coins=coins: next(coins))
        calls = []

        def noisy(hyperparameters, calls=calls):
            calls.append(len(calls))
            print("trial", len(calls))
            os.write(1, b"from C\n")
            os.write(2, b"from C\n")
            sys.stderr.write("error\n")
            logging.getLogger("trial").error("logged %d", len(calls))
            warnings.warn(f"trial {len(calls)} of this kind", ResourceWarning, stacklevel=1)
            return train(hyperparameters)

        def score(model, calls=calls, number=number):
            return 1.0 if calls[-1] == best_of(range(number)) else 0.0

        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        keras.utils.clear_session()
        first = function_number()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            best = search(noisy, 3, score)
        assert len(calls) == number
        # The winner's warning is shown, once, as its own.
        assert sum("of this kind" in str(w.message) for w in caught) == 1
        output = capfd.readouterr()
        assert (output.out, output.err, caplog.text) == ("", "", "")
        assert list(folder.iterdir()) == []
        assert best.score == 1.0
        assert sorted(vars(best)) == ["hyperparameters", "model", "score"]
        seen.append(everything(best.model, folder, first))
    assert seen[0] == seen[1]
    assert min(seen[0]["functions"]) > 2**22  # as many as the search uses up


def test_names_go_on_after_those_of_the_winner(monkeypatch):
    """A loser with more layers, which comes last, leaves no gap in Keras's numbers."""
    coins = iter([1.0, 1.0, 0.0])
    monkeypatch.setattr("random.SystemRandom.random", lambda self: next(coins))
    keras.utils.clear_session()
    sizes = iter([2, 1, 9])

    def layers(hyperparameters):
        hidden = [keras.layers.Dense(4) for _ in range(next(sizes))]
        model = private_model(dp.DPSGD(0.1, noise_multiplier=1.0), plain_model(*hidden))
        model.optimizer.charge(model.ledger, LAW, STEPS)
        return model

    best = search(layers, 3, score=lambda model: -float(model.count_params()))
    assert [layer.name for layer in best.model.model.layers] == ["dense", "dense_1"]
    assert keras.layers.Dense(1).name == "dense_2"


def test_losers_are_gone(monkeypatch):
    """No loser's weights can be reached from the winner, or from anywhere else."""
    coins = iter([1.0, 1.0, 1.0, 0.0])
    monkeypatch.setattr("random.SystemRandom.random", lambda self: next(coins))
    made = []

    def mark(hyperparameters):
        model = train(hyperparameters)
        made.append(id(model.model.weights[0]))
        return model

    best = search(mark, 3, score=lambda model: float(len(made) == 2))
    del made[1]  # the winner
    gc.collect()
    alive = {id(o) for o in gc.get_objects() if isinstance(o, keras.Variable)}
    assert not alive & set(made)
    assert best.score == 1.0


def test_losers_move_no_later_random_number():
    """A seed that is public before the search tells nothing about what is drawn after it."""
    drawn = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        trials_of(1)
        drawn.append(
            (float(np.random.random()), float(tf.random.normal([])), plain_model().get_weights()[0])
        )
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]
    assert not np.array_equal(drawn[0][2], drawn[1][2])


def test_output_comes_back_afterwards(capfd):
    handlers = []

    def keep(hyperparameters):
        handlers.append(logging.StreamHandler())  # holds the stream of the trial
        raise ValueError

    with pytest.raises(RuntimeError):
        search(keep, 1)
    print("printed")
    os.write(1, b"written\n")
    logger = logging.getLogger("made in a trial")
    logger.propagate = False
    logger.addHandler(handlers[0])
    logger.error("logged")
    output = capfd.readouterr()
    assert "printed" in output.out
    assert "written" in output.out
    assert "logged" in output.err


def test_a_seeded_search_says_that_it_is():
    def seeded(hyperparameters):
        model = private_model(dp.DPSGD(0.1, noise_multiplier=1.0, seed=3))
        model.fit(X, Y, batch_size=30, steps_per_epoch=STEPS, verbose=0)
        return model

    scored = lambda model: -model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]  # noqa: E731
    first, second = (search(seeded, 3, scored, seed=1) for _ in range(2))
    assert first.score == second.score
    assert first.hyperparameters == second.hyperparameters
    assert [entry.reproducible_noise for entry in first.model.ledger.entries] == [True]
    assert "reproducible noise" in first.model.ledger.statement(1e-5)
    assert math.isfinite(first.model.epsilon(1e-5))
