"""Differentially private training of Keras models with adaptive optimizers.

`import tf_adadp as dp` is cheap: the names below load TensorFlow when they are first used, and
`tf_adadp.accounting` never loads it.
"""

import importlib
import importlib.abc
import importlib.util
import sys

__version__ = "0.1.0"

_MODULE_OF = {
    "ADADP": "optimizers",
    "ADAL": "optimizers",
    "ADAN": "optimizers",
    "AGD": "optimizers",
    "AdaCliP": "optimizers",
    "AutoSGD": "optimizers",
    "ClippedSums": "clipping",
    "DPAdam": "optimizers",
    "DPModel": "model",
    "DPOPT": "optimizers",
    "DPOptimizer": "optimizers",
    "DPPCA": "pca",
    "DPRMSprop": "optimizers",
    "DPSGD": "optimizers",
    "DeclaredLots": "sampling",
    "FixedSizeLots": "sampling",
    "InverseSqrtDecay": "optimizers",
    "PCAProjection": "pca",
    "PoissonLots": "sampling",
    "PrivacyCallback": "callbacks",
    "PrivacyLedger": "accounting",
    "PrivacyWarning": "accounting",
    "RawMetricsWarning": "metrics",
    "ReleasedMetrics": "metrics",
    "SADPSGD": "optimizers",
    "ShuffledLots": "sampling",
    "TruncatedPoissonLots": "sampling",
    "UserLots": "sampling",
    "accounting": None,
    "audit": None,
    "clipped_sum": "gradients",
    "clipping": None,
    "load_model": "model",
    "make_lot": "sampling",
    "make_private": "optimizers",
    "noise": None,
    "priors": "optimizers",
    "private_step": "training.private_step",
    "replicas": "distribution",
    "validate": "validation",
    "workers": "distribution",
}
__all__ = sorted(_MODULE_OF)
_NEEDS_KERAS = {
    f"{__name__}.{module or name}"
    for name, module in _MODULE_OF.items()
    if (module or name) != "accounting"
}


def __getattr__(name):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULE_OF[name]
    value = importlib.import_module(f"{__name__}.{module or name}")
    if module is not None:
        value = getattr(value, name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


def _register():
    # Beside Keras 2, as tensorflow-privacy needs it, `accounting` works and nothing else would.
    if sys.modules["keras"].__version__.startswith("2."):
        return
    for module in ("model", "pca"):  # the modules with classes of saved models
        importlib.import_module(f"{__name__}.{module}")


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
                # Not where one of our own modules is importing Keras: it would be met half made.
                if not any(name in sys.modules for name in _NEEDS_KERAS):
                    _register()

            spec.loader.exec_module = execute_and_register
        return spec


if "keras" in sys.modules and hasattr(sys.modules["keras"], "Model"):
    _register()
else:
    sys.meta_path.insert(0, _RegisterAfterKeras())
