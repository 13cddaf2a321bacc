"""Raw operations of TensorFlow and Keras between the layers of a model, drawn by a number."""

import itertools
import math

import keras
import numpy as np
import tensorflow as tf

from verification.fuzzing.graphs import FITS, Drawing

_MOST_STEPS, _LARGEST_POOL = 40, 7


class Operations(keras.Layer):
    """Applies drawn operations to a batch and a weight, and returns a batch of the same shape.

    Args:
        number: of the draw.
        length: of axes that are unknown while the layer is built.
    """

    def __init__(self, number, length):
        super().__init__()
        self._number, self._length = number, length

    def build(self, shape):
        self._shape = tuple(self._length if n is None else n for n in shape[1:])
        with tf.init_scope():  # a subclassed model is built while it is traced
            self._function = RandomFunction(self._number, self._shape, self._shape)
        self.weight = self.add_weight(self._shape, "random_normal")
        self.kernel = self.add_weight((self._function.size, math.prod(self._shape)))
        if self._function.is_random:
            self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, inputs):
        x, weight, kernel = (tf.cast(t, tf.float32) for t in (inputs, self.weight, self.kernel))
        x = tf.ensure_shape(x, [None, *self._shape])
        key = self.seed_generator.next() if self._function.is_random else [0, 0]
        outputs = tf.tanh(self._function(x, weight, tf.cast(key, tf.int32))) @ kernel
        return tf.cast(tf.reshape(outputs, [-1, *self._shape]), inputs.dtype)

    def compute_output_shape(self, input_shape):
        return input_shape


class RandomFunction:
    """A function of a batch and a weight, of operations that are drawn once.

    It runs, and has a gradient, for batches of any size. For a batch of one example it is the same
    whether its size is known while it is traced or not; for others a constant may have the size.

    Args:
        seed: of the draws.
        shape: of an example.
        weight_shape: of the weight.

    Attributes:
        size: the number of entries per example of the output.
        is_random: whether it draws random numbers from its key.
    """

    def __init__(self, seed, shape, weight_shape):
        for attempt in itertools.count():
            self._seed = [seed, attempt]
            self._steps, self._place, self.size, self.is_random = [], None, None, False
            if self._is_drawn(shape, weight_shape):
                break

    def __call__(self, x, weight, key):
        """Returns the output [B, size], float32.

        Args:
            x: [B, *shape], float32.
            weight: float32.
            key: int32 [2].
        """
        output = self._pool(x, weight, key)[self._place]
        return tf.reshape(output, [-1, self.size])

    def _pool(self, x, weight, key):
        drawing = Drawing(None, [x, weight], key)
        for step in self._steps:
            drawing.generator = np.random.default_rng([*self._seed, step])
            drawing.extend()
        return drawing.pool

    def _is_drawn(self, shape, weight_shape):
        """Draws operations, and looks for an output that works; tells whether there is one."""
        specs = [tf.TensorSpec([None, *shape]), tf.TensorSpec(weight_shape)]
        specs.append(tf.TensorSpec([2], tf.int32))
        shapes = []

        def drawn(x, weight, key):
            drawing = Drawing(None, [x, weight], key)
            for step in range(_MOST_STEPS):
                drawing.generator = np.random.default_rng([*self._seed, step])
                if drawing.extend():
                    self._steps.append(step)
                if len(drawing.pool) >= _LARGEST_POOL:
                    break
            self.is_random = drawing.is_random
            shapes[:] = [t.shape for t in drawing.pool]
            return drawing.pool

        tf.function(drawn, autograph=False).get_concrete_function(*specs)
        for place in range(len(shapes) - 1, 1, -1):
            self._place, self.size = place, shapes[place][1:].num_elements()
            if shapes[place].rank and shapes[place][0] is None and self.size and self._works(specs):
                return True
        return False

    def _works(self, specs):
        """Tells whether the output has rows and gradients, for each size of a batch."""

        def with_gradients(*inputs):
            output = self(*inputs)
            back = tf.gradients(tf.tanh(output), inputs[:2], unconnected_gradients="zero")
            return output, back

        generator = np.random.default_rng(0)
        _, weight, key = specs
        others = generator.normal(size=weight.shape).astype(np.float32), [7, 11]
        try:
            run = tf.function(with_gradients, autograph=False).get_concrete_function(*specs)
            for count in (3, 2, 1):
                x = generator.normal(size=(count, *specs[0].shape[1:])).astype(np.float32)
                found, _ = run(*map(tf.constant, (x, *others)))
                if len(found) != count:
                    return False
            alone = self(*map(tf.constant, (x, *others)))
        except (*FITS, LookupError, tf.errors.OpError):
            return False
        return alone.shape == found.shape and np.allclose(alone, found, 1e-4, equal_nan=True)
