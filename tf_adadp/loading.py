"""Loads models with the ledger that was saved with them."""

from typing import Any

import keras

from tf_adadp import model as _registered  # noqa: F401  (Keras finds DPModel by its name)


def load_model(
    filepath: Any,
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> Any:
    """Loads a file that holds a `DPModel`, as `keras.saving.load_model`; noise keys are new.

    Example:
        >>> layers = [keras.Input((4,)), keras.layers.Dense(1)]
        >>> model = dp.DPModel(keras.Sequential(layers))
        >>> model.compile(dp.DPSGD(noise_multiplier=1.0), "mse")
        >>> model.save("model.keras")
        >>> dp.load_model("model.keras").ledger.steps
        0
    """
    return keras.saving.load_model(
        filepath, custom_objects=custom_objects, compile=compile, safe_mode=safe_mode
    )
