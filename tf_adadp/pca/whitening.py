"""ZCAWhitening: shrinks the strongest directions of a model's inputs, by private components."""

from collections.abc import Mapping

import keras
import tensorflow as tf

from tf_adadp.pca.layer import PCAProjection


@keras.saving.register_keras_serializable(package="tf_adadp")
class ZCAWhitening(PCAProjection):
    """Flattens raw inputs, normalises them and scales them by f_i along component i:

        x ← x/‖x‖₂,   z = x − Cᵀ diag(1 − f) C x,   z/‖z‖₂

    Usually made by `DPPCA.whitening()`. Inputs [B, ...] of d entries, outputs [B, d]: what is
    orthogonal to the components keeps its direction. The components C [k, d] and the factors f [k]
    are not trainable and are saved with the model.

    Guarantee: as `PCAProjection`: each example by itself, and a ledger that has the cost. The
    factors are post-processing of the released eigenvalues.

    Args:
        n_components: k.
        n_features: d.
        normalize: whether inputs and outputs are normalised; if False neither is.
        public: True says that components and factors are public knowledge and cost nothing.
        **kwargs: these and others: see `PCAProjection`.

    Raises:
        ValueError: an argument is out of range; inputs have another number of entries.

    Example:
        >>> layer = dp.DPPCA(n_components=2, noise_multiplier=16.0).fit(np.eye(8)).whitening()
        >>> layer(np.ones((3, 8))).shape
        TensorShape([3, 8])
    """

    def __init__(self, n_components: int, n_features: int, **kwargs: object) -> None:
        super().__init__(n_components, n_features, **kwargs)
        self.factors = self._add_constant("factors", (n_components,), "ones")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Whitens a batch."""
        ops = keras.ops
        rows = self._rows(inputs)
        along = ops.matmul(rows, ops.transpose(self.components)) * (1.0 - self.factors)
        rows = rows - ops.matmul(along, self.components)
        if self.normalize:
            norms = ops.sqrt(ops.sum(rows * rows, axis=1, keepdims=True))
            rows = rows / ops.maximum(norms, keras.config.epsilon())  # zeros stay zeros
        return ops.cast(rows, self.compute_dtype)

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        """Returns [B, d]."""
        return (input_shape[0], self.n_features)

    def load_own_variables(self, store: Mapping) -> None:
        """Reads components and factors, and adds their cost to the ledger."""
        super().load_own_variables(store)
        self.factors.assign(store["1"])
