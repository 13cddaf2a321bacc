"""Refuses tokens for which an Embedding has no row, in arrays, before training."""

import keras
import numpy as np

from tf_adadp.utils.keras_compat import functional_inputs, inbound_nodes, is_part_of_keras


def check_tokens(model: keras.Model, x: object, name: str = "x") -> None:
    """Refuses arrays with tokens out of range for an `Embedding` that reads them directly.

    In training such a record contributes nothing, see `gradients.indices`. It is still an error in
    the data, so it is reported before privacy budget is spent.

    Args:
        model: a `keras.Model`; a model that is not a graph of layers is not checked.
        x: its inputs as arrays, in a structure that Keras takes.
        name: the argument that holds them.
    """
    struct = functional_inputs(model)
    if struct is None:
        return
    inputs = keras.tree.flatten(struct)
    arrays = dict(zip(map(id, inputs), _in_order(struct, inputs, x), strict=False))
    for layer in model.layers:
        if not _looks_up(layer):
            continue
        for node in inbound_nodes(layer):
            read = arrays.get(id(node.input_tensors[0]))
            if read is None or not len(read):
                continue
            least, most = (edge(np.asarray(read)) for edge in (np.min, np.max))
            if not (_names_a_row(least, layer.input_dim) and _names_a_row(most, layer.input_dim)):
                raise ValueError(
                    f"{name} has tokens from {least:g} to {most:g}, and the Embedding "
                    f"{layer.name!r} has input_dim={layer.input_dim}: number the tokens "
                    f"0..{layer.input_dim - 1}."
                )


def _in_order(struct, inputs, x):
    """Returns the arrays of x in the order of a functional model's inputs; none if they misfit."""
    if isinstance(x, dict):
        names = struct if isinstance(struct, dict) else [tensor.name for tensor in inputs]
        if set(names) != set(x):
            return []
        if not isinstance(struct, dict):
            return [x[name] for name in names]
    arrays = keras.tree.flatten(x)
    return arrays if len(arrays) == len(inputs) else []


def _names_a_row(indices, size):
    """Tells where indices name a row of a table of `size` rows; as in Keras, −1 is its last one."""
    return (indices >= -size) & (indices < size)


def _looks_up(layer):
    """Tells whether a layer is an `Embedding` whose inputs are indices into its table."""
    return isinstance(layer, keras.layers.Embedding) and is_part_of_keras(
        type(layer).call,
        "layers",  # a user's `call` may take anything
    )
