"""PCAProjection: the first layer of a model that sees its inputs through private components."""

import copy
import math
from collections.abc import Mapping, MutableMapping
from typing import Self

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.pca.rows import LENGTH
from tf_adadp.utils import checks
from tf_adadp.utils.attached import LEDGER, attach, attached


@keras.saving.register_keras_serializable(package="tf_adadp")
class PCAProjection(keras.layers.Layer):
    """Flattens raw inputs, normalises them and projects them: x/‖x‖₂ · Cᵀ.

    Usually made by `DPPCA.layer()`. Inputs [B, ...] of any shape and numeric type whose entries
    number d; outputs [B, k]. Inputs of zeros, or with a NaN or an infinity, count as zeros, as in
    `DPPCA`. The components C [k, d] are not trainable and are saved with the model.

    Guarantee: each example is processed independently. `ledger` has the cost of the components. It
    is saved with them in weights, configs and clones, and a `DPModel` that contains the layer
    merges it into its own. What moves bare arrays does not move it: `set_weights` of a plain model,
    and weights files of the old .h5 format.

    Args:
        n_components: k.
        n_features: d.
        normalize: whether inputs are normalised; if False they are projected as they are.
        ledger: the `PrivacyLedger` of the components, which is copied. Without it a model that
            contains the layer refuses to report ε, until weights that bring theirs are loaded.
        public: True says that the components are public knowledge and cost nothing.

    Raises:
        ValueError: an argument is out of range; inputs have another number of entries.

    Example:
        >>> layer = dp.DPPCA(n_components=2, noise_multiplier=16.0).fit(np.eye(8)).layer()
        >>> layer(np.zeros((3, 8))).shape
        TensorShape([3, 2])
    """

    def __init__(
        self,
        n_components: int,
        n_features: int,
        normalize: bool = True,
        ledger: PrivacyLedger | None = None,
        public: bool = False,
        **kwargs: object,
    ) -> None:
        # Raw inputs keep their type: float16 would overflow before they are normalised.
        super().__init__(autocast=False, **kwargs)
        for name, value in (("n_components", n_components), ("n_features", n_features)):
            setattr(self, name, checks.check_integer(name, value, at_least=1))
        checks.check_instance(
            "ledger",
            ledger,
            PrivacyLedger | None,
            "a PrivacyLedger, or None",
            wrong_type=ValueError,
        )
        self.normalize = checks.check_bool("normalize", normalize)
        self.public = checks.check_bool("public", public)
        if public and ledger is not None:
            raise ValueError("public=True with a ledger: give one of them.")
        # Made here, not in `build`: a model must know the cost before it has met data.
        shape = (self.n_components, self.n_features)
        self.components = self._add_constant("components", shape, "zeros")
        self._awaits_ledger = ledger is None and not public
        if self._awaits_ledger:
            ledger = PrivacyLedger()
            ledger.mark_unknown(
                "the components of a PCAProjection came without their ledger: make it with "
                "`DPPCA.layer()`, or with public=True"
            )
        if ledger is not None:
            # DPModel looks for ledgers on variables. A copy: models add their own releases to it.
            attach(self.components, LEDGER, copy.copy(ledger))

    def _add_constant(self, name, shape, initializer):
        return self.add_weight(
            shape=shape,
            initializer=initializer,
            dtype="float32",
            trainable=False,
            autocast=False,
            name=name,
        )

    @property
    def ledger(self) -> PrivacyLedger | None:
        """Returns the ledger of the components, by now with the model's own steps; or None."""
        return attached(self.components, LEDGER)

    def build(self, input_shape: tuple) -> None:
        """Checks the number of features."""
        shape = tuple(input_shape[1:])
        if None in shape or math.prod(shape) != self.n_features:
            raise ValueError(
                f"inputs of {self.name!r} have shape {tuple(input_shape)}: give inputs of "
                f"{self.n_features} entries each, as the components were fitted on."
            )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Projects a batch."""
        outputs = keras.ops.matmul(self._rows(inputs), keras.ops.transpose(self.components))
        return keras.ops.cast(outputs, self.compute_dtype)

    def _rows(self, inputs):
        """Returns flattened inputs, float32; of length 1 if `normalize`."""
        ops = keras.ops
        rows = ops.reshape(inputs, (ops.shape(inputs)[0], self.n_features))
        if self.normalize:
            rows = ops.cast(rows, "float64")  # as `unit_rows` does
            rows = ops.where(ops.all(ops.isfinite(rows), axis=1, keepdims=True), rows, 0.0)
            largest = ops.max(ops.abs(rows), axis=1, keepdims=True, initial=0.0)
            rows = rows / ops.where(largest > 0, largest, 1.0)
            norms = ops.sqrt(ops.sum(rows * rows, axis=1, keepdims=True))
            rows = rows * (LENGTH / ops.maximum(norms, 1.0))
        return ops.cast(rows, "float32")

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        """Returns [B, k]."""
        return (input_shape[0], self.n_components)

    def save_own_variables(self, store: MutableMapping) -> None:
        """Writes the components and the ledger."""
        super().save_own_variables(store)
        if self.ledger is not None:
            store["ledger"] = np.frombuffer(self.ledger.to_json().encode(), np.uint8)

    def load_own_variables(self, store: Mapping) -> None:
        """Reads the components, and adds their cost to the ledger."""
        if "ledger" in store:
            self.public = False
            stored = PrivacyLedger.from_json(np.asarray(store["ledger"]).tobytes().decode())
            if self.ledger is None or self._awaits_ledger:
                attach(self.components, LEDGER, stored)
                self._awaits_ledger = False
            else:
                self.ledger.merge(stored, same_data=True)
        self.components.assign(np.asarray(store["0"]))

    def get_config(self) -> dict:
        """Returns the arguments of the constructor, the ledger as JSON text."""
        return {
            **super().get_config(),
            "n_components": self.n_components,
            "n_features": self.n_features,
            "normalize": self.normalize,
            "ledger": None if self.ledger is None else self.ledger.to_json(),
            "public": self.public,
        }

    @classmethod
    def from_config(cls, config: dict) -> Self:
        """Makes the layer that `get_config` described."""
        ledger = config["ledger"]
        ledger = None if ledger is None else PrivacyLedger.from_json(ledger)
        return super().from_config({**config, "ledger": ledger})
