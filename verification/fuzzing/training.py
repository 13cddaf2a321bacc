"""The arguments of one training, and the mistakes and extremes that a case may put into them."""

import keras
import numpy as np
import tensorflow as tf

import tf_adadp as dp
from verification.fuzzing import build

_FROM_ARRAYS = (
    "batch_size", "x_", "labels", "weights", "class_weight", "dataset", "generator",
    "validation_split",
)  # fmt: skip


class Training:
    """Holds what `DPModel`, the optimizer, `compile` and `fit` are given.

    Attributes:
        case: the case as it is run.
        wrap, compile: arguments by name.
        steps, charges: how many steps are taken, how many events they are charged by.
        size, max_size, expected_size: of a lot.
        element_spec: of the data.
    """

    def __init__(self, case, plain, data, lots, rng):
        trouble = case["trouble"] or ""
        if trouble.startswith(_FROM_ARRAYS):
            case = {**case, "lots": "arrays"}
        self.case = case
        self._rng = rng
        self.wrap = {
            "physical_batch_size": case["physical_batch_size"],
            "gradient_engine": case["engine"],
        }
        self._optimizer = {}
        self._replaces_optimizer = None
        self.compile = {
            "loss": build.losses(case),
            "jit_compile": case["jit_compile"],
            "run_eagerly": case["eager"],
            "steps_per_execution": case["steps_per_execution"],
            "metrics": build.metrics(case),
        }
        x, y, weights = data
        self.size, self.max_size = build.sizes(case)
        self._fit = {"steps_per_epoch": lots, "epochs": 1, "verbose": 0}
        made = build.lots(case, x, y, weights)
        if made is None:
            self._fit |= {"x": x, "y": y, "batch_size": self.size, "sample_weight": weights}
            if case["weights"] == "class":
                self._fit["class_weight"] = {0: 0.5, 1: 2.0}
            one = np.ones(case["rows"]) if case["weights"] == "class" else weights
            made = dp.PoissonLots(x, y, expected_size=self.size, sample_weight=one)
        else:
            self._fit["x"] = made
        self.element_spec, self.expected_size = made.element_spec, made.expected_size
        self._later = None
        self._strategy = None
        if trouble:
            self._trouble(trouble, plain)
        self.steps = self._fit["epochs"] * (self._fit["steps_per_epoch"] or made.steps_per_epoch)
        at_once = case["steps_per_execution"]
        self.steps = -(-self.steps // at_once) * at_once
        self.charges = -(-self.steps // made.law.lots_per_pass)

    def optimizer(self):
        if self._replaces_optimizer is not None:
            return self._replaces_optimizer
        return build.optimizer(self.case, self._optimizer, self._rng)

    def compiled(self, plain):
        """Does what happens between `compile` and `fit`."""
        if self._later is not None:
            self._later(plain)

    def fit(self, private):
        if self._strategy is not None:
            with self._strategy.scope():
                private.fit(**self._fit)
        else:
            private.fit(**self._fit)

    def _trouble(self, name, plain):
        fit, rows = self._fit, self.case["rows"]
        x, y = fit.get("x"), fit.get("y")

        def each(function):
            return keras.tree.map_structure(function, y)

        def writes(y_true, y_pred):
            _STATE.assign_add(1.0)
            return keras.ops.mean(keras.ops.square(y_pred), -1)

        def freeze(model):
            for layer in model._flatten_layers(include_self=False):
                if layer.trainable_variables:
                    layer.trainable = False
                    return

        fits = {
            "batch_size_none": {"batch_size": None},
            "batch_size_zero": {"batch_size": 0},
            "batch_size_too_large": {"batch_size": rows + 1},
            "batch_size_text": {"batch_size": "32"},
            "batch_size_nan": {"batch_size": float("nan")},
            "batch_size_fraction": {"batch_size": 1e-3},
            "labels_missing": {"y": None},
            "x_missing": {"x": None},
            "weights_short": {"sample_weight": np.ones(rows + 1)},
            "weights_text": {"sample_weight": np.full(rows, "a")},
            "weights_deep": {"sample_weight": np.ones((rows, 2, 2))},
            "class_weight_list": {"class_weight": [1.0, 2.0]},
            "class_weight_missing": {"class_weight": {7: 1.0}},
            "epochs_zero": {"epochs": 0},
            "steps_zero": {"steps_per_epoch": 0},
            "early_stopping": {"callbacks": [keras.callbacks.EarlyStopping("loss")]},
            "shuffle_false": {"shuffle": False},
            "validation_split_one": {"validation_split": 1.0},
            "generator": {"x": iter([1]), "y": None},
        }
        compiles = {
            "loss_unknown": {"loss": "cross"},
            "loss_reduces_batch": {"loss": lambda t, p: keras.ops.mean(keras.ops.square(p))},
            "loss_none": {"loss": None},
            "loss_for_other_outputs": {"loss": {"elsewhere": "mse"}},
            "loss_writes": {"loss": writes},
            "metric_named_epsilon": {
                "metrics": [keras.metrics.SparseCategoricalAccuracy(name="epsilon")]
            },
            "jit_text": {"jit_compile": "yes"},
            "eager_and_jit": {"jit_compile": True, "run_eagerly": True},
            "steps_per_execution_zero": {"steps_per_execution": 0},
            "steps_per_execution_text": {"steps_per_execution": "2"},
        }
        wraps = {
            "physical_zero": {"physical_batch_size": 0},
            "engine_text": {"gradient_engine": "fast"},
        }
        optimizers = {
            "noise_negative": {"noise_multiplier": -1.0},
            "noise_zero": {"noise_multiplier": 0.0},
            "noise_nan": {"noise_multiplier": float("nan")},
            "clip_zero": {"l2_norm_clip": 0.0},
            "clip_huge": {"l2_norm_clip": 1e9},
            "clip_tiny": {"l2_norm_clip": 1e-9},
            "clip_unknown_prefix": {"l2_norm_clip": {"nowhere": 1.0}},
            "rate_nan": {"learning_rate": float("nan")},
            "rate_negative": {"learning_rate": -1.0},
            "accumulation": {"gradient_accumulation_steps": 2},
            "microbatch_zero": {"microbatch_size": 0},
            "gamma_negative": {"automatic_clipping": -1.0},
        }
        labels = {
            "labels_out_of_range": lambda a: np.full_like(a, 9),
            "labels_negative": lambda a: np.full(a.shape, -1),
            "labels_nan": lambda a: np.full(a.shape, np.nan),
            "labels_text": lambda a: np.full(a.shape, "a"),
            "labels_short": lambda a: a[1:],
            "labels_wide": lambda a: np.zeros((len(a), 7), a.dtype),
            "labels_deep": lambda a: np.zeros((len(a), 2, 2, 2), a.dtype),
        }
        inputs = {
            "x_empty": lambda a: a[:0],
            "x_text": lambda a: np.full(a.shape, "a"),
            "x_object": lambda a: np.full(a.shape, None, object),
            "x_complex": lambda a: a.astype(np.complex64),
            "x_wrong_width": lambda a: np.concatenate([a, a], -1),
        }
        if name in fits:
            fit.update(fits[name])
            if name == "batch_size_fraction":
                self.size = 1e-3
        elif name in compiles:
            self.compile.update(compiles[name])
        elif name in wraps:
            self.wrap.update(wraps[name])
        elif name in optimizers:
            self._optimizer = optimizers[name]
        elif name in labels:
            fit["y"] = each(labels[name])
        elif name in inputs:
            fit["x"] = keras.tree.map_structure(inputs[name], x)
        elif name == "x_wrong_structure":
            fit["x"] = {"elsewhere": keras.tree.flatten(x)[0]}
        elif name == "optimizer_plain":
            self._replaces_optimizer = keras.optimizers.Adam()
        elif name == "optimizer_text":
            self._replaces_optimizer = "adam"
        elif name == "all_frozen":
            plain.trainable = False
        elif name == "frozen_later":
            self._later = freeze
        elif name == "dataset":
            parts = keras.tree.lists_to_tuples((x, y))
            dataset = tf.data.Dataset.from_tensor_slices(parts).batch(4)
            fit.update(x=dataset, y=None, batch_size=None)
        elif name == "strategy":
            self._strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
        else:
            raise KeyError(name)


_STATE = tf.Variable(0.0, trainable=False)
