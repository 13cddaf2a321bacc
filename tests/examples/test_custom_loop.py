import math
import re

import custom_loop
import datasets
import pytest

import tf_adadp as dp


def test_ledger_holds_what_ran():
    data = datasets.load("digits")
    epochs = 2
    _, ledger = custom_loop.train(data, epochs=epochs)
    num_examples = len(data.x_train)
    steps = epochs * math.ceil(num_examples / custom_loop.EXPECTED_LOT_SIZE)
    for accountant in ("rdp", "pld"):
        expected = dp.accounting.epsilon(
            custom_loop.NOISE_MULTIPLIER,
            custom_loop.EXPECTED_LOT_SIZE / num_examples,
            steps,
            custom_loop.DELTA,
            accountant,
        )
        measured = ledger.epsilon(custom_loop.DELTA, accountant)
        assert measured == pytest.approx(expected, rel=1e-12)


def test_main_trains_a_useful_model_and_prints_its_price(capsys):
    custom_loop.main()
    last = capsys.readouterr().out.splitlines()[-1]
    accuracy, epsilon = map(float, re.findall(r"accuracy ([\d.]+), ε = ([\d.]+)", last)[0])
    # The noise is secret and unseeded. The threshold lies far below what runs reach (0.85 at
    # least), so a false alarm would need a deviation of several times their spread of 0.02.
    assert accuracy > 0.7
    assert 0 < epsilon < 5
