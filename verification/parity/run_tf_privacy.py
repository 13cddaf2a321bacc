"""The side of tensorflow-privacy, in its own environment, and `tf_adadp.accounting` there.

Called by compare.py with a folder: reads inputs.npz and tf_adadp.json, writes tf_privacy.json.
"""

import argparse
import contextlib
import importlib.metadata
import io
import json
import pathlib
import re

import dp_accounting
import numpy as np
import tensorflow as tf
import tensorflow_privacy
from tensorflow_privacy.privacy.analysis import compute_dp_sgd_privacy_lib as privacy_lib
from tensorflow_privacy.privacy.analysis import compute_noise_from_budget_lib as noise_lib
from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry

from verification.parity import accounting_figures, cases

_PACKAGES = ("tensorflow", "tensorflow-privacy", "dp-accounting", "numpy", "scipy")
_PRINTED = re.compile(r"Epsilon assuming Poisson sampling \(\*\):\s+([\d.]+)")
_Accountant = privacy_lib.AccountantType


def epochs(case):
    """Epochs that tensorflow-privacy rounds up to `case.steps` steps, whatever the rounding."""
    return (case.steps - 0.5) * case.sampling_probability


def epsilon(training, accountant=_Accountant.RDP):
    """tensorflow-privacy's ε in full: what its privacy statement prints to three places."""
    full = training.lots == "full"
    return privacy_lib._compute_dp_sgd_example_privacy(
        training.steps if full else epochs(training),
        training.noise_multiplier,
        training.delta,
        used_microbatching=training.lots == "microbatched",
        poisson_subsampling_probability=None if full else training.sampling_probability,
        accountant_type=accountant,
    )


def fixed_size_epsilon(training):
    """ε of lots of a fixed size: no routine of tensorflow-privacy, dp_accounting's own."""
    # Replacing a record moves a clipped sum by up to twice the bound.
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        training.num_examples,
        training.lot_size,
        dp_accounting.GaussianDpEvent(training.noise_multiplier / 2),
    )
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    return accountant.compose(event, training.steps).get_epsilon(training.delta)


def printed_epsilon(training):
    """ε as `compute_dp_sgd_privacy_statement` prints it."""
    statement = tensorflow_privacy.compute_dp_sgd_privacy_statement(
        training.num_examples,
        training.lot_size,
        epochs(training),
        training.noise_multiplier,
        training.delta,
        used_microbatching=False,
    )
    return float(_PRINTED.search(statement)[1])


def deprecated_epsilon(training):
    """ε of `compute_dp_sgd_privacy`, which has orders of its own."""
    return tensorflow_privacy.compute_dp_sgd_privacy(
        training.num_examples,
        training.lot_size,
        training.noise_multiplier,
        epochs(training),
        training.delta,
    )[0]


def compute_noise(budget):
    """σ of `compute_noise`, which has orders of its own and prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return noise_lib.compute_noise(
            budget.num_examples,
            budget.lot_size,
            budget.target_epsilon,
            epochs(budget),
            budget.delta,
            noise_lbd=0.4,
        )


def calibrated_noise(budget):
    """σ of dp_accounting's search, with the orders of its accountant."""

    def event(sigma):
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        sampled = dp_accounting.PoissonSampledDpEvent(budget.sampling_probability, gaussian)
        return dp_accounting.SelfComposedDpEvent(sampled, budget.steps)

    return dp_accounting.calibrate_dp_mechanism(
        dp_accounting.rdp.RdpAccountant,
        event,
        budget.target_epsilon,
        budget.delta,
        dp_accounting.LowerEndpointAndGuess(0.4, 0.8),
    )


def price(budget, noise_multiplier):
    """tensorflow-privacy's ε of a noise multiplier that tf_adadp found for a budget."""
    return epsilon(cases.Training(noise_multiplier, *budget[1:]))


def accounting_figures_of_peer(calibrated):
    """A dict of lists in the order of the cases.

    Args:
        calibrated: the noise multipliers tf_adadp found for `cases.BUDGETS`.
    """
    return {
        "epsilon": [epsilon(training) for training in cases.GRID],
        "printed": [printed_epsilon(training) for training in cases.SAMPLE],
        "deprecated": [deprecated_epsilon(training) for training in cases.SAMPLE],
        "pld": [epsilon(training, _Accountant.PLD) for training in cases.PLD_GRID],
        "other_lots": [
            fixed_size_epsilon(training) if training.lots == "fixed" else epsilon(training)
            for training in cases.OTHER_LOTS
        ],
        "compute_noise": [compute_noise(budget) for budget in cases.BUDGETS],
        "noise_multiplier": [calibrated_noise(budget) for budget in cases.BUDGETS],
        "price": [price(*pair) for pair in zip(cases.BUDGETS, calibrated, strict=True)],
    }


class _Optimizer:
    """A model trained by one of tensorflow-privacy's private optimizers."""

    def __init__(self, arrays, model, prefix, name, arguments):
        self.model = tf.keras.Sequential(cases.layers(tf.keras, model))
        self.model.set_weights(cases.weights_of(arrays, model))
        self._optimizer = getattr(tensorflow_privacy, f"{prefix}{name}Optimizer")(
            l2_norm_clip=cases.L2_NORM_CLIP,
            noise_multiplier=0.0,
            num_microbatches=cases.LOT_SIZE,
            **arguments,
        )

    @tf.function
    def gradient(self, x, y):
        """Returns what the update rule is given."""
        return [g for g, _ in self._gradients(x, y)]

    @tf.function
    def step(self, x, y):
        """One step on a lot."""
        self._optimizer.apply_gradients(self._gradients(x, y))

    def _gradients(self, x, y):
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        return self._optimizer._compute_gradients(
            lambda: loss(y, self.model(x, training=True)), self.model.trainable_variables
        )


class _Model:
    """A `DPSequential` of tensorflow-privacy, with a plain optimizer of Keras."""

    def __init__(self, arrays, model, registry, name, arguments):
        self.model = tensorflow_privacy.DPSequential(
            l2_norm_clip=cases.L2_NORM_CLIP,
            noise_multiplier=0.0,
            use_xla=False,
            layer_registry=registry,
            layers=cases.layers(tf.keras, model),
        )
        if registry is not None and not self.model._enable_fast_peg_computation:
            raise ValueError(f"model={model!r} has a layer that fast clipping does not know.")
        self.model.set_weights(cases.weights_of(arrays, model))
        self.model.compile(
            optimizer=getattr(tf.keras.optimizers, name)(**arguments),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

    def step(self, x, y):
        """One step on a lot."""
        self.model.train_on_batch(x, y)


def _optimizer_figures(arrays, model, prefix):
    lots = list(zip(arrays[f"{model}/x"], arrays[f"{model}/y"], strict=True))
    weights = {}
    for optimizer, (name, arguments) in cases.OPTIMIZERS.items():
        peer = _Optimizer(arrays, model, prefix, name, arguments)
        if not weights:
            gradient = cases.flat(peer.gradient(*lots[0]))
        weights[optimizer] = _weights_after_steps(peer, lots)
    return {"gradient": gradient, "weights": weights}


def _model_figures(arrays, model, registry):
    # SGD alone, whose weights show the clipped gradients: the rest would be Keras's own.
    lots = zip(arrays[f"{model}/x"], arrays[f"{model}/y"], strict=True)
    peer = _Model(arrays, model, registry, *cases.OPTIMIZERS["sgd"])
    return {"weights": {"sgd": _weights_after_steps(peer, lots)}}


def _weights_after_steps(peer, lots):
    weights = []
    for lot in lots:
        peer.step(*lot)
        weights.append(cases.flat(peer.model.get_weights()))
    return weights


def training_figures(arrays):
    """Gradients and weights by model and implementation."""
    registry = layer_registry.make_default_layer_registry()
    figures = {
        model: {
            "DPKeras": _optimizer_figures(arrays, model, "DPKeras"),
            "VectorizedDPKeras": _optimizer_figures(arrays, model, "VectorizedDPKeras"),
            "DPSequential": _model_figures(arrays, model, None),
        }
        for model in cases.MODELS
    }
    # Fast clipping knows no convolutions.
    figures["mlp"]["DPSequential, fast"] = _model_figures(arrays, "mlp", registry)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    calibrated = json.loads((folder / "tf_adadp.json").read_text())["accounting"]
    figures = {
        "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
        "accounting": accounting_figures_of_peer(calibrated["noise_multiplier"]),
        "tf_adadp_accounting": accounting_figures.figures(cases),
        "training": training_figures(dict(np.load(folder / "inputs.npz"))),
    }
    (folder / "tf_privacy.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
