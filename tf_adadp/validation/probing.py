"""What a model does with the examples of a batch, found by running it on random public data.

Trials can show that examples are mixed and never that they are not: a layer may mix loud inputs
only, or large batches. The guarantee does not rest on them; training keeps to single examples
whatever it cannot follow (`gradients.proof`). What is found here is told because the
model then learns something else than it would without privacy.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.gradients.compiled_losses import losses_of_rows
from tf_adadp.gradients.indices import no_index_stops
from tf_adadp.gradients.patching import PATCHING, replaced
from tf_adadp.gradients.random_data import ROWS, random_batches
from tf_adadp.utils.keras_compat import (
    CompileLoss,
    call_arguments,
    get_keras_mask,
    layers_of,
    seed_generators,
    set_keras_mask,
)
from tf_adadp.utils.problems import Problem

_ALONE = "in private training every example is worked on alone, as a batch of one"


def probe(
    model: keras.Model, element_spec: tuple, loss: CompileLoss | None = None
) -> Iterator[Problem]:
    """Yields a `Problem` for each fault that a forward and a backward pass on random data show.

    No variable is written. Everything found is a warning: training goes on, differently.

    Args:
        model: a built `keras.Model` without side effects (`gradients.ExampleGraph`).
        element_spec: `(x, y, sample_weight)` of TensorSpecs of a batch.
        loss: a built Keras `CompileLoss`, or None.
    """
    (x, y, _), (other_x, other_y, _) = random_batches(element_spec)
    first = _Pass(model, x)
    yield from _state_problems(model, first)
    unseeded = _culprits(first, _Pass(model, x, first, slice(None)))
    for name in unseeded:
        yield Problem(
            name,
            "draws random numbers that no seed generator of the model gives: the passes over an "
            "example draw different ones",
            "Use keras.random with a keras.random.SeedGenerator that is an attribute of the layer.",
            "warning",
        )
    other = _Pass(model, other_x, first)
    # What changes by itself cannot be told from what others change.
    mixing = [name for name in _culprits(first, other) if name not in unseeded]
    for name in mixing:
        yield Problem(
            name,
            f"mixes examples: one row of its output changes with the others; {_ALONE}",
            "Work along other axes than the first; to normalise, use GroupNormalization or "
            "LayerNormalization.",
            "warning",
        )
    if not mixing and not unseeded and not _close(first.gradients, other.gradients):
        yield Problem(
            f"The model {model.name!r}",
            "mixes examples in its backward pass: the gradient of one row of its output changes "
            f"with the others; {_ALONE}",
            "Let custom gradients work on each row by itself.",
            "warning",
        )
    if not first.seeds_drawn:  # random layers draw otherwise for another shape
        alone = _Pass(model, tf.nest.map_structure(lambda t: t[:1], x), first)
        for name in _culprits(first, alone):
            if name not in mixing and name not in unseeded:
                yield Problem(
                    name,
                    f"depends on the number of examples in the batch; {_ALONE}",
                    "Leave the batch size out of it.",
                    "warning",
                )
    if loss is not None:
        yield from _mixing_losses(loss, (y, other_y), (first.outputs, other.outputs))


@dataclasses.dataclass
class _Call:
    """One call of a layer: its name, its caller's, and the tensors that went in and came out."""

    name: str
    caller: str
    inputs: list
    outputs: list


class _Pass:
    """A forward pass in training mode, layer by layer, and a gradient of its first row.

    Args:
        model: a built `keras.Model`.
        x: inputs, leaves [B, ...].
        like: a pass whose values the outputs of every layer get, in `rows` and after they were
            noted, so that what one layer does does not hide what the next one does.
        rows: all, or the first.

    Attributes:
        outputs: the model's.
        calls: list of `_Call`, in the order in which they began.
        updates: {id of a variable: (it, the name of the layer that wrote it)}.
        gradients: of a sum over the first row of the outputs.
    """

    def __init__(self, model, x, like=None, rows=slice(0, 1)):
        self.calls, self.updates = [], {}
        self._open = []
        self._like, self._rows = like, rows
        weights = [v for v in model.trainable_variables if tf.as_dtype(v.dtype).is_floating]
        values = [tf.convert_to_tensor(v.value) for v in weights]
        training = call_arguments(model, training=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(PATCHING)
            stack.enter_context(no_index_stops())
            for layer in layers_of(model):
                name = f"{'The model' if layer is model else 'Layer'} {layer.name!r}"
                stack.enter_context(replaced(layer, call=self._recorded(layer, name)))
            tape = stack.enter_context(tf.GradientTape(watch_accessed_variables=False))
            tape.watch(values)
            mapping = list(zip(weights, values, strict=True))
            stack.enter_context(_Scope(mapping, self._note_update))
            self.outputs = model(x, **training)
            first = [tf.cast(t[0], tf.float32) for t in _floating(self.outputs)]
            total = tf.add_n([tf.reduce_sum(t * _pattern(t)) for t in first]) if first else None
        self.gradients = []
        if total is not None and values:
            found = tape.gradient(total, values, unconnected_gradients="zero")
            self.gradients = [tf.convert_to_tensor(g) for g in found]

    @property
    def seeds_drawn(self):
        """Whether a seed generator moved on."""
        return any(_is_seed(variable) for variable, _ in self.updates.values())

    def _recorded(self, layer, name):
        inner = layer.call

        def call(*args, **kwargs):
            caller = self._open[-1] if self._open else name
            made = _Call(name, caller, _tensors((args, kwargs)), [])
            place = len(self.calls)
            self.calls.append(made)
            self._open.append(made.name)
            try:
                outputs = inner(*args, **kwargs)
            finally:
                self._open.pop()
            made.outputs = _tensors(outputs)
            return outputs if self._like is None else self._with_rows_of(place, made, outputs)

        return call

    def _with_rows_of(self, place, made, outputs):
        twin = self._like.calls[place] if place < len(self._like.calls) else None
        if twin is None or twin.name != made.name:
            return outputs
        if _comparable(made.outputs, twin.outputs, self._rows) is None:
            return outputs
        theirs = iter(twin.outputs)
        return tf.nest.map_structure(
            lambda t: self._spliced(t, next(theirs)) if isinstance(t, tf.Tensor) else t, outputs
        )

    def _spliced(self, tensor, theirs):
        rows = theirs
        if self._rows.stop is not None:
            rows = tf.concat([theirs[self._rows], tensor[self._rows.stop :]], 0)
        if tensor.dtype.is_floating:  # the value alone: gradients flow as they did
            rows = tensor + tf.stop_gradient(rows - tensor)
        mask = get_keras_mask(tensor)
        if mask is not None:
            set_keras_mask(rows, mask)
        return rows

    def _note_update(self, variable):
        self.updates.setdefault(id(variable), (variable, self._open[-1]))


class _Scope(keras.StatelessScope):
    """A stateless scope that tells which variables are written in it."""

    def __init__(self, state_mapping, note):
        super().__init__(state_mapping=state_mapping, collect_losses=True)
        self._note = note

    def add_update(self, update):
        self._note(update[0])
        super().add_update(update)


def _state_problems(model, made):
    known = {id(v) for v in model.variables}
    generators = {id(generator.state) for _, generator in seed_generators(model)}
    for key, (variable, name) in made.updates.items():
        if key in generators:
            continue
        if _is_seed(variable) and key not in known:
            yield Problem(
                name,
                "draws from a seed generator that is none of its attributes: it draws the same "
                "numbers for every example in every step",
                "Make a keras.random.SeedGenerator in its constructor, and give it to keras.random "
                "as `seed`.",
                "warning",
            )
        else:
            yield Problem(
                name,
                f"writes the variable {variable.path!r} in training: a private step drops that, so "
                "the variable keeps its value",
                "Set it from public data before training, or do without it.",
                "warning",
            )


def _culprits(one, other):
    """The names of those who made unequal rows from equal ones, among the rows compared.

    Every call hands on the rows of the pass that it is like. So outputs that differ are the call's
    own doing, and inputs that differ are its caller's, between one part and the next.
    """
    names = []
    for call, twin in zip(one.calls, other.calls, strict=False):
        if call.name != twin.name:
            break
        inputs = _comparable(call.inputs, twin.inputs, other._rows)
        outputs = _comparable(call.outputs, twin.outputs, other._rows)
        if inputs and not _close(*inputs):
            names.append(call.caller)
        elif inputs and outputs and not _close(*outputs):
            names.append(call.name)
    return list(dict.fromkeys(names))


def _comparable(tensors, others, rows):
    """The rows of two lists of tensors, or None where their first axis is not that of examples."""
    if len(tensors) != len(others):
        return None
    if any(len(t.shape) == 0 or t.shape[0] not in (1, ROWS) for t in (*tensors, *others)):
        return None
    return [t[rows] for t in tensors], [t[rows] for t in others]


def _close(tensors, others):
    """Whether tensors agree up to rounding, of NaN and of half precision too."""
    for tensor, other in zip(tensors, others, strict=True):
        if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
            if not np.array_equal(tensor.numpy(), other.numpy()):
                return False
            continue
        a, b = (np.asarray(tf.cast(t, tf.float64)) for t in (tensor, other))
        tolerance = 0.05 if tensor.dtype.size == 2 else 1e-3
        scale = np.max(np.abs(a), initial=0.0, where=np.isfinite(a))
        if a.shape != b.shape or not np.allclose(a, b, tolerance, tolerance * scale, True):
            return False
    return True


def _mixing_losses(loss, labels, outputs):
    """Yields a `Problem` for every loss whose first row changes with the other rows."""
    pairs = zip(tf.nest.flatten(outputs[0]), tf.nest.flatten(outputs[1]), strict=True)
    y_pred = [tf.concat([a[:1], b[1:]], 0) for a, b in pairs]
    first = losses_of_rows(loss, labels[0], outputs[0])
    other = losses_of_rows(loss, labels[1], tf.nest.pack_sequence_as(outputs[0], y_pred))
    for (name, values), (_, others) in zip(first, other, strict=True):
        rows = _comparable([values], [others], slice(0, 1))
        if rows is not None and not _close(*rows):
            yield Problem(
                f"The loss {name!r}",
                f"mixes examples: the loss of one changes with the others; {_ALONE}",
                "Let the loss of an example depend on its own labels and predictions.",
                "warning",
            )


def _tensors(structure):
    return [t for t in tf.nest.flatten(structure) if isinstance(t, tf.Tensor)]


def _floating(structure):
    return [t for t in _tensors(structure) if t.dtype.is_floating]


def _pattern(tensor):
    """Unequal factors, so that no symmetry (of a softmax, a normalisation) hides a change."""
    return tf.reshape(tf.cos(tf.range(tf.size(tensor), dtype=tensor.dtype)), tf.shape(tensor))


def _is_seed(variable):
    return variable.path.endswith("seed_generator_state") and tuple(variable.shape) == (2,)
