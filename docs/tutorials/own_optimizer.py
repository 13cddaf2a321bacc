# %% [markdown]
# # Write an optimizer of your own
#
# A private optimizer has two parts: how gradients are clipped and given noise, and the update rule. The library
# owns the first part, with its accounting. You write the second one, or shape the first from public facts and past
# releases. In this order, from the simplest: any Keras optimizer, an update rule of your own, a schedule, a set that adapts.

# %%
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_adadp as dp
from tf_adadp import accounting, audit, clipping

DELTA = 1e-5
images, labels = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=360, random_state=0)


def train(optimizer):
    """Returns the test accuracy of a small network at ε = 2."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    model = dp.DPModel(keras.Sequential(layers))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    budget = {"target_epsilon": 2.0, "target_delta": DELTA}
    model.compile(optimizer, loss, metrics=["accuracy"], log_raw_metrics=False, **budget)
    model.fit(x, y, batch_size=256, epochs=20, verbose=0)
    accuracy = model.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"]
    name = type(optimizer).__name__
    print(f"{name}: {accuracy:.1%} at epsilon = {model.epsilon(DELTA):.2f}")
    return accuracy


# %% [markdown]
# ## Any Keras optimizer
#
# `make_private` puts DP-SGD's clipping and noise in front of the update rule of a Keras optimizer.

# %%
DPNadam = dp.make_private(keras.optimizers.Nadam)
nadam_accuracy = train(DPNadam(learning_rate=0.01))


# %% [markdown]
# ## An update rule of your own
#
# An update rule is a Keras optimizer: state in `build`, one step in `update_step`, arguments in `get_config`. This one
# goes a fixed length along the sign of an average of gradients (signum). `make_private` makes it private, and its
# argument `gradient` is then a released one.


# %%
@keras.saving.register_keras_serializable(package="tutorial")
class Signum(keras.optimizers.Optimizer):
    """θ ← θ − η·sign(m) with m ← β·m + (1 − β)·g."""

    def __init__(self, learning_rate: float = 0.01, *, momentum: float = 0.9, **kwargs: Any):
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.momentum = momentum

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the averages."""
        if not self.built:
            super().build(variables)
            self._averages = self.add_optimizer_variables(variables, "average")

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Updates one variable."""
        average = self._averages[self._get_variable_index(variable)]
        self.assign(average, self.momentum * average + (1 - self.momentum) * gradient)
        self.assign_sub(variable, learning_rate * keras.ops.sign(average))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {**super().get_config(), "momentum": self.momentum}


DPSignum = dp.make_private(Signum)
signum_accuracy = train(DPSignum(0.01))


# %% [markdown]
# ## A clip norm that follows a schedule
#
# `clipping_set` returns the set that gradients are clipped into, anew for each step. It may depend on anything public,
# as the number of steps, and on past releases. Each set brings the noise that fits it, so the cost of a step stays that
# of DP-SGD.


# %%
@keras.saving.register_keras_serializable(package="tutorial")
class HalvingSGD(dp.DPSGD):
    """DP-SGD whose clip norm halves after every 40 steps."""

    def clipping_set(self) -> clipping.ClippingSet:
        """Returns the ball of this step."""
        halvings = tf.cast(self.iterations // 40, tf.float32)
        return clipping.L2Ball(self.l2_norm_clip * 0.5**halvings)


halving_accuracy = train(HalvingSGD(2.0, l2_norm_clip=2.0))

# %% [markdown]
# The update rule sees released gradients only. What it computes from them is post-processing, so the guarantee
# does not depend on it.
#
# Fixed bounds by layer need no class. If the model is named "net" and a layer "hidden", `dp.DPSGD(l2_norm_clip={"net/hidden/":
# 0.5, "": 1.0})` gives this layer a ball of its own, and all other weights another. (`weight.path` is the path of a weight.)
#
# ## A clipping set that adapts
#
# For comparison, DP-SGD with the same rate as the class below:

# %%
sgd_accuracy = train(dp.DPSGD(2.0))

# %% [markdown]
# DP-SGD clips to a ball: every coordinate gets the same noise. Where layers have gradients of different sizes,
# an ellipsoid gives each layer noise in proportion to its own gradients. Their sizes are not known, but past
# releases tell them.
#
# The class below clips layer v by a bound b_v, and updates b_v from what was released:
#
#     b_v = C·√((m̄ + m_v)/(2·m̄)),   K = {g : Σ_v ‖g_v‖²/b_v² ≤ 1}
#     m̄ = Σ_v m_v·d_v / Σ_v d_v
#     m_v ← β·m_v + (1 − β)·max(mean(g̃_v²) − s_v², 0)
#
# with g̃_v the noisy gradient of layer v, d_v its size, and s_v the standard deviation of its noise, which is public.
# m_v estimates the mean square of the layer's gradient without noise. The estimate is noisy itself, so b_v goes only
# half of the way from equal bounds to the estimated ones.


# %%
@keras.saving.register_keras_serializable(package="tutorial")
class LayerwiseSGD(dp.DPOptimizer, keras.optimizers.SGD):
    """Steps along a gradient that is clipped in proportion to past releases, layer by layer.

    Guarantee: b depends on past releases alone, and noise σ*·b fits the set K, so a step costs one
    Gaussian mechanism of multiplier σ*.
    """

    def __init__(self, learning_rate: float = 1.0, *, decay: float = 0.9, **kwargs: Any):
        super().__init__(learning_rate, **kwargs)
        self.decay = decay

    def _build_private(self, variables):
        self._sizes = [math.prod(variable.shape) for variable in variables]
        self._mean_squares = [self._add_state((), f"square_{i}") for i in range(len(variables))]
        for mean_square in self._mean_squares:
            mean_square.assign(1e-6)

    def clipping_set(self) -> clipping.ClippingSet:
        """Returns the ellipsoid of this step."""
        m = [tf.convert_to_tensor(square.value) for square in self._mean_squares]
        total = tf.add_n([value * size for value, size in zip(m, self._sizes, strict=True)])
        mean = total / sum(self._sizes)
        bounds = [self.l2_norm_clip * tf.sqrt((mean + value) / (2 * mean)) for value in m]
        return clipping.Ellipsoid(bounds)

    def _observe(self, released: Sequence[tf.Tensor], stddevs: Sequence[tf.Tensor]):
        for square, g, std in zip(self._mean_squares, released, stddevs, strict=True):
            signal = tf.reduce_mean(tf.square(g)) - tf.reduce_mean(tf.square(std))
            square.assign(self.decay * square + (1 - self.decay) * tf.maximum(signal, 0.0))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {**super().get_config(), "decay": self.decay}


own_accuracy = train(LayerwiseSGD(2.0))

# %% [markdown]
# Its accuracy is close to that of DP-SGD here, because the two layers of this network have gradients of similar size.
# (`dp.ADADP` estimates such sizes by row and column, and shrinks them towards each other as far as noise explains their
# differences.) The class needs four methods: for its state, its clipping set, the update of the state, and its
# configuration. None of them receives a raw gradient. Therefore everything that the class computes is post-processing of
# releases.
#
# ## Attack it
#
# A class of yours deserves an attack before anybody trusts it. There are two, and you need both. The first one takes a few
# steps, and takes them again from the recorded releases, without the data. If both ends are equal, weights and state
# follow from what was released, and nothing else of the data reaches them. (State lives in `_add_state` and
# `_add_slots`: a graph reads a plain Python attribute only once. And do not override `apply_private` or `step_on_lot`, which
# have raw sums.)

# %%
optimizer = LayerwiseSGD(1.0, noise_multiplier=2.0)
optimizer.build([keras.Variable(np.zeros(2, "float32")), keras.Variable(np.zeros(3, "float32"))])
rng = np.random.default_rng(0)
difference = audit.replay_difference(optimizer, [rng.normal(size=(8, 2)), rng.normal(size=(8, 3))])
print(f"largest difference between training and its replay: {difference}")

# %% [markdown]
# The second one tests whether a release costs what is charged. It draws many releases with and without one record, the
# canary, and computes a lower bound on ε from them.

# %%
found = audit.audit_optimizer(
    optimizer,
    canary=[np.array([9.0, 1.0]), np.array([-5.0, 7.0, 2.0])],
    steps=3,
    draws=20_000,
    delta=DELTA,
    jit_compile=True,
)
ledger = accounting.PrivacyLedger()
optimizer.charge(ledger, accounting.PoissonSampling(1, 1), 3)
claim = ledger.epsilon(DELTA, "pld")
law = audit.gaussian_epsilon_lower_bound(
    found.scores, found.neighbor_scores, delta=DELTA, confidence=0.999
)
print(f"{law.epsilon:.2f} <= epsilon <= {claim:.2f}")

# %% [markdown]
# The lower bound comes close to the claim, and stays below it. `CONTRIBUTING.md` has the whole recipe for an
# optimizer that is to become part of the library, with the tests that it must pass.
