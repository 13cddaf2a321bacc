"""Any Keras optimizer, made private."""

import inspect

import keras

from tf_adadp.optimizers.base import DPOptimizer
from tf_adadp.optimizers.dpadam import DPAdam
from tf_adadp.optimizers.dprmsprop import DPRMSprop
from tf_adadp.optimizers.dpsgd import DPSGD

# Keras's own, registered on import so that a saved model loads after a plain `import tf_adadp`.
_BUILT_IN = ("Adadelta", "Adafactor", "Adagrad", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam")
_MADE = {
    keras.optimizers.SGD: DPSGD,
    keras.optimizers.Adam: DPAdam,
    keras.optimizers.RMSprop: DPRMSprop,
}


def make_private(optimizer_class: type[keras.optimizers.Optimizer]) -> type[DPOptimizer]:
    """Makes the private form of a Keras optimizer class: `dp.make_private(keras.optimizers.Nadam)`.

    The class it returns feeds Keras's own update rule with DP-SGD's released vector,

        g̃ = (Σ_x clip_C(g_x) + N(0, σ*²C² I)) / L,

    and takes the arguments of `DPOptimizer` (training needs noise_multiplier) and those of the
    Keras optimizer, the learning rate first and all else by keyword. It is the same as the mixin
    written out,

        @keras.saving.register_keras_serializable("my_package")
        class DPNadam(tf_adadp.DPOptimizer, keras.optimizers.Nadam): ...

    and as private as `DPOptimizer`: the update rule is post-processing of releases.

    Classes of Keras's optimizers are registered under their own names, "tf_adadp>DPNadam", and load
    after a plain `import tf_adadp`. One of your own is registered with its module, as
    "tf_adadp.my_module>DPMine"; call `make_private` before loading.

    Args:
        optimizer_class: a subclass of `keras.optimizers.Optimizer` that updates from gradients.

    Returns:
        A class; the same one for the same argument.

    Raises:
        TypeError: not such a class, or private already.

    Example:
        >>> DPNadam = dp.make_private(keras.optimizers.Nadam)
        >>> DPNadam(learning_rate=0.001, noise_multiplier=1.1).l2_norm_clip
        1.0
    """
    if not inspect.isclass(optimizer_class) or not issubclass(
        optimizer_class, keras.optimizers.Optimizer
    ):
        raise TypeError(
            f"optimizer_class={optimizer_class!r}: give a class, such as keras.optimizers.Nadam; "
            "its arguments go to the class that comes back."
        )
    if issubclass(optimizer_class, DPOptimizer):
        raise TypeError(f"optimizer_class={optimizer_class.__name__} is private already.")
    if issubclass(optimizer_class, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "optimizer_class=LossScaleOptimizer: its dynamic scale is a raw statistic. Under "
            "mixed_float16 DPModel uses one fixed scale by itself; give the inner optimizer."
        )
    if optimizer_class not in _MADE:
        name = f"DP{optimizer_class.__name__}"
        body = {
            "__module__": __name__,
            "__doc__": f"`{optimizer_class.__name__}` on DP-SGD's release; see `make_private`.",
        }
        made = type(name, (DPOptimizer, optimizer_class), body)
        own = optimizer_class.__module__.startswith("keras.")
        package = "tf_adadp" if own else f"tf_adadp.{optimizer_class.__module__}"
        _MADE[optimizer_class] = keras.saving.register_keras_serializable(package)(made)
    return _MADE[optimizer_class]


for _name in _BUILT_IN:
    make_private(getattr(keras.optimizers, _name))
