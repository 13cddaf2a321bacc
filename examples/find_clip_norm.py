"""Finds a clip norm by a search that is charged, and reports what the search costs.

    python examples/find_clip_norm.py --mean_trials=10

trains on scikit-learn's digits, with no download, some seconds for each trial. The last line on
stdout is a JSON object: the clip norm and the accuracy of the winner, ε of one training without
the search, and ε of the winner with it, which is the one to state.

Trials are compared by their accuracy on the 360 test digits. No ε protects those.
"""

import json
import math
import sys

import datasets
from absl import app, flags

import tf_adadp as dp  # loads TensorFlow when a name of it is first used

_CLIP_NORMS = flags.DEFINE_list(
    "clip_norms", ["0.03", "0.1", "0.3", "1", "3", "10"], "Clip norms C to choose from; public."
)
_MEAN_TRIALS = flags.DEFINE_float("mean_trials", 10.0, "Mean number of trials.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 10, "Epochs of one trial.", lower_bound=1)
_LOT_SIZE = flags.DEFINE_integer("lot_size", 128, "Expected lot size L.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.5, "Learning rate of DP-SGD, over C.")
_TARGET_EPSILON = flags.DEFINE_float(
    "target_epsilon", 4.0, "Finds the least noise multiplier for which the SEARCH costs at most ε."
)
_TARGET_DELTA = flags.DEFINE_float("target_delta", 1e-5, "δ; must lie below 1/N to mean anything.")

flags.register_validator(
    _CLIP_NORMS,
    lambda values: values and all(0 < float(value) < math.inf for value in values),
    message="give numbers above 0.",
)
for _holder in (_LEARNING_RATE, _TARGET_EPSILON):
    flags.register_validator(
        _holder, lambda value: 0 < value < math.inf, message="give a finite number above 0."
    )


def build_optimizer(clip_norm, noise_multiplier):
    """DP-SGD whose step is as long whatever the clip norm: the rate is divided by it."""
    rate = _LEARNING_RATE.value / clip_norm
    return dp.DPSGD(rate, l2_norm_clip=clip_norm, noise_multiplier=noise_multiplier)


def find():
    """Searches as the flags say, and returns the summary."""
    import keras  # here, so that --help does not wait for it

    data = datasets.load("digits")
    num_examples, delta = len(data.x_train), _TARGET_DELTA.value
    if _LOT_SIZE.value > num_examples:
        sys.exit(f"--lot_size={_LOT_SIZE.value}: there are {num_examples} training records.")
    law = dp.accounting.PoissonSampling(num_examples, _LOT_SIZE.value)
    steps = _EPOCHS.value * math.ceil(num_examples / _LOT_SIZE.value)

    # The noise with which the whole search is within the budget, and what one trial then costs.
    ledger, planned = dp.PrivacyLedger(), dp.PrivacyLedger()
    sigma = ledger.calibrate_noise_multiplier(
        _TARGET_EPSILON.value,
        delta,
        law,
        steps=1,
        step=lambda s: dp.accounting.search_event(law.event(s), steps, _MEAN_TRIALS.value),
    )
    build_optimizer(1.0, sigma).charge(planned, law, steps)

    def train(hyperparameters):
        model = dp.DPModel(
            keras.Sequential(
                [
                    keras.Input(data.x_train.shape[1:]),
                    keras.layers.Flatten(),
                    keras.layers.Dense(64, activation="tanh"),
                    keras.layers.Dense(data.num_classes),
                ]
            )
        )
        model.compile(
            build_optimizer(hyperparameters["clip_norm"], sigma),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            log_raw_metrics=False,
        )
        model.fit(data.x_train, data.y_train, batch_size=_LOT_SIZE.value, epochs=_EPOCHS.value)
        return model

    def accuracy(model):
        return model.evaluate(data.x_test, data.y_test, return_dict=True)["accuracy"]

    best = dp.tuning.search(
        train,
        {"clip_norm": [float(value) for value in _CLIP_NORMS.value]},
        planned,
        mean_trials=_MEAN_TRIALS.value,
        score=accuracy,
        score_data="the 360 test digits",
        ledger=ledger,
        target_epsilon=_TARGET_EPSILON.value,
        target_delta=delta,
    )
    print(best.model.ledger.statement(delta))
    return {
        "clip_norm": best.hyperparameters["clip_norm"],
        "accuracy": best.score,
        "epsilon_without_search": planned.epsilon(delta),
        "epsilon": best.model.epsilon(delta),
        "delta": delta,
        "mean_trials": _MEAN_TRIALS.value,
        "noise_multiplier": sigma,
        "steps": steps,
        "lot_size": _LOT_SIZE.value,
    }


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: flags start with --.")
    print(json.dumps(find()), flush=True)


if __name__ == "__main__":
    app.run(main)
