"""Loads models with the ledger that was saved with them."""

from typing import Any

import keras

from tf_adadp.model import DPModel  # Keras finds it by its name
from tf_adadp.persistence.changed_weights import remember_loaded


def load_model(
    filepath: Any,
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> Any:
    """Loads a file that holds a `DPModel`, as `keras.saving.load_model`; noise keys are new.

    Changes of the loaded weights by anything but private training are noticed, as after training.

    Example:
        >>> layers = [keras.Input((4,)), keras.layers.Dense(1)]
        >>> model = dp.DPModel(keras.Sequential(layers))
        >>> model.compile(dp.DPSGD(noise_multiplier=1.0), "mse")
        >>> model.save("model.keras")
        >>> dp.load_model("model.keras").ledger.steps
        0
    """
    model = keras.saving.load_model(
        filepath, custom_objects=custom_objects, compile=compile, safe_mode=safe_mode
    )
    if isinstance(model, DPModel):
        remember_loaded(model)
    return model
