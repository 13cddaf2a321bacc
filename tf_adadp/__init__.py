"""Differentially private training of Keras models with adaptive optimizers.

`import tf_adadp as dp` is cheap: the names in `__init__.pyi` load TensorFlow when they are first
used, and `tf_adadp.accounting` never loads it.
"""

import importlib
import importlib.abc
import importlib.util
import sys

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _register():
    # Beside Keras 2, as tensorflow-privacy needs it, `accounting` works and nothing else would.
    if sys.modules["keras"].__version__.startswith("2."):
        return
    for module in ("model", "pca"):  # the modules with classes of saved models
        importlib.import_module(f"{__name__}.{module}")


def _is_importing_keras():
    """Tells whether one of our own modules is importing Keras; it would be met half made."""
    free = (f"{__name__}.accounting", f"{__name__}.utils")
    needing = [m for m in sys.modules if m.startswith(f"{__name__}.") and not m.startswith(free)]
    return bool(needing) or f"{__name__}.utils.keras_compat" in sys.modules


class _RegisterAfterKeras(importlib.abc.MetaPathFinder):
    """Registers our classes with Keras as soon as Keras is imported.

    `keras.saving.load_model` finds a custom class by its registration alone, so after a plain
    `import tf_adadp` the classes must be there, whichever of the two is imported first.
    """

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("keras")
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                if not _is_importing_keras():
                    _register()

            spec.loader.exec_module = execute_and_register
        return spec


if "keras" in sys.modules and hasattr(sys.modules["keras"], "Model"):
    _register()
else:
    sys.meta_path.insert(0, _RegisterAfterKeras())
