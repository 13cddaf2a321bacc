"""Trains an image classifier with differential privacy and reports its accuracy and ε.

    python examples/train.py --optimizer=adadp --log_dir=runs/demo

trains on scikit-learn's digits in under a minute, with no download. The last line on stdout is a
JSON object; the log directory gets TensorBoard logs and a figure of test accuracy and ε against
steps. The test accuracy after every epoch is for the reader: nothing is chosen by it.
"""

import importlib.metadata
import json
import math
import pathlib
import platform
import sys
import time

import datasets
from absl import app, flags, logging

import tf_adadp as dp  # loads TensorFlow when a name of it is first used


def _private_nadam():
    from keras.optimizers import Nadam

    return dp.make_private(Nadam)


# Keras and matplotlib are imported where they are used, so that --help does not wait for them.
_PRIVATE = {
    "dpsgd": lambda: dp.DPSGD,
    "dpadam": lambda: dp.DPAdam,
    "dprmsprop": lambda: dp.DPRMSprop,
    "adal": lambda: dp.ADAL,
    "adan": lambda: dp.ADAN,
    "adadp": lambda: dp.ADADP,
    "adaclip": lambda: dp.AdaCliP,
    "dpopt": lambda: dp.DPOPT,
    "autosgd": lambda: dp.AutoSGD,
    "dpnadam": _private_nadam,
}
_ADAPTIVE_NOISE = ("adan", "adadp")

_DATASET = flags.DEFINE_string(
    "dataset",
    "digits",
    "digits (bundled with scikit-learn), or the name of a <name>.npz in --data_dir (uint8 arrays "
    "x_train, y_train, x_test, y_test), or any image classification task of tensorflow-datasets, "
    "e.g. mnist, fashion_mnist, cifar10.",
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder of .npz files, or of tensorflow-datasets (its own default if unset)."
)
_MODEL = flags.DEFINE_enum(
    "model",
    "mlp",
    ["logistic", "mlp", "cnn"],
    "logistic: softmax regression. mlp: one hidden layer of 256 tanh units. cnn: two convolutions "
    "and a dense layer with tanh. (Bounded activations suit clipped gradients: Papernot et al. "
    "2020, Tempered Sigmoid Activations for Deep Learning with Differential Privacy.)",
)
_OPTIMIZER = flags.DEFINE_enum(
    "optimizer",
    "adadp",
    ["nonprivate", *_PRIVATE],
    "nonprivate: Keras's Adam on the plain model, as a baseline. adal is another name of "
    "dprmsprop.",
)
_EPOCHS = flags.DEFINE_integer(
    "epochs", 60, "Epochs; one is ceil(N / lot_size) steps.", lower_bound=1
)
_LOT_SIZE = flags.DEFINE_integer(
    "lot_size",
    128,
    "Expected lot size L. Every step draws each training record with probability L/N.",
    lower_bound=1,
)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", None, "Default: the optimizer's own.")
_NOISE_MULTIPLIER = flags.DEFINE_float(
    "noise_multiplier",
    None,
    "Noise standard deviation over clip norm. Default 4, unless --target_epsilon is given.",
)
_TARGET_EPSILON = flags.DEFINE_float(
    "target_epsilon", None, "Finds the least noise multiplier for which all epochs cost at most ε."
)
_TARGET_DELTA = flags.DEFINE_float("target_delta", 1e-5, "δ; must lie below 1/N to mean anything.")
_MAX_EPSILON = flags.DEFINE_float(
    "max_epsilon", None, "Stops before the step that would exceed this ε."
)
_L2_NORM_CLIP = flags.DEFINE_float("l2_norm_clip", 1.0, "Clip norm C of an example's gradient.")
_CLIPPING = flags.DEFINE_enum(
    "clipping",
    None,
    ["ellipsoid", "local"],
    "adan, adadp: shape of the clipping set. local is the paper's coordinate-wise clipping. "
    "Default: ellipsoid.",
)
_LOCAL_CLIP_FACTOR = flags.DEFINE_float(
    "local_clip_factor", None, "adan, adadp with --clipping=local: β of the paper. Default: 1.2."
)
_LOG_DIR = flags.DEFINE_string(
    "log_dir",
    None,
    "TensorBoard logs and figure. Default: runs/<dataset>_<model>_<optimizer>.",
    allow_override=True,  # absl.logging has a flag of this name, for its own log files
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the model's initial weights.", lower_bound=0)
_REPRODUCIBLE_NOISE = flags.DEFINE_bool(
    "reproducible_noise",
    False,
    "FOR TESTS ONLY: draws lots and noise from --seed too. Whoever knows the seed can subtract the "
    "noise, so the result protects nobody.",
)

flags.mark_flags_as_mutual_exclusive(["noise_multiplier", "target_epsilon"])
for _holder in (
    _LEARNING_RATE,
    _NOISE_MULTIPLIER,
    _TARGET_EPSILON,
    _MAX_EPSILON,
    _L2_NORM_CLIP,
    _LOCAL_CLIP_FACTOR,
):
    flags.register_validator(
        _holder,
        lambda value: value is None or 0 < value < math.inf,
        message="give a finite number above 0.",
    )
flags.register_validator(
    _TARGET_DELTA, lambda delta: 0 < delta < 1, message="give a number between 0 and 1."
)


def build_model(kind, input_shape, num_classes):
    """A plain Keras classifier of images [height, width, channels] that returns logits.

    "cnn" is the tanh network of the SA-DPSGD paper (26,010 parameters on 28×28×1); images below 16
    pixels get the same layers with 3×3 kernels.
    """
    import keras

    layers = keras.layers
    body = [keras.Input(input_shape)]
    if kind == "mlp":
        body += [layers.Flatten(), layers.Dense(256, activation="tanh")]
    elif kind == "cnn":
        small = min(input_shape[:2]) < 16
        first, second = (3, 3) if small else (8, 4)
        body += [
            layers.Conv2D(16, first, strides=1 if small else 2, padding="same", activation="tanh"),
            layers.MaxPooling2D(2, strides=1),
            layers.Conv2D(32, second, strides=2, activation="tanh"),
            layers.MaxPooling2D(2, strides=1),
            layers.Flatten(),
            layers.Dense(32, activation="tanh"),
        ]
    else:
        body.append(layers.Flatten())
    return keras.Sequential([*body, layers.Dense(num_classes)])


def build_optimizer(noise_multiplier):
    """The optimizer that the flags describe; without noise_multiplier, `fit` finds it."""
    import keras

    arguments = {}
    if _LEARNING_RATE.value is not None:
        arguments["learning_rate"] = _LEARNING_RATE.value
    if _OPTIMIZER.value == "nonprivate":
        return keras.optimizers.Adam(**arguments)
    if _CLIPPING.value is not None:
        arguments["clipping"] = _CLIPPING.value
    if _LOCAL_CLIP_FACTOR.value is not None:
        arguments["local_clip_factor"] = _LOCAL_CLIP_FACTOR.value
    if _clips():
        arguments["l2_norm_clip"] = _L2_NORM_CLIP.value
    return _PRIVATE[_OPTIMIZER.value]()(
        noise_multiplier=noise_multiplier,
        seed=_SEED.value if _REPRODUCIBLE_NOISE.value else None,
        **arguments,
    )


def plot(steps, accuracies, epsilons, title, path):
    """Writes a PNG of test accuracy and, unless epsilons is None, ε against steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    left = figure.add_subplot()
    left.plot(steps, [100 * a for a in accuracies], "o-", color="tab:blue", markersize=3)
    left.set_xlabel("steps (lots)")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_ylabel("test accuracy (%)", color="tab:blue")
    left.tick_params(axis="y", colors="tab:blue")
    left.grid(alpha=0.3)
    left.set_title(title, fontsize=10)
    if epsilons is not None:
        right = left.twinx()
        right.plot(steps, epsilons, "s--", color="tab:red", markersize=3)
        right.set_ylim(bottom=0)
        right.set_ylabel(f"ε at δ = {_TARGET_DELTA.value:g} (RDP)", color="tab:red")
        right.tick_params(axis="y", colors="tab:red")
    figure.savefig(path, dpi=150)


def versions():
    """Versions of what the result depends on."""
    packages = ("tensorflow", "keras", "dp-accounting", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "tf_adadp": dp.__version__, **found}


def train():
    """Trains as the flags say, writes the figure, and returns the summary."""
    import keras

    private = _OPTIMIZER.value != "nonprivate"
    try:
        data = datasets.load(_DATASET.value, _DATA_DIR.value)
    except ValueError as error:
        sys.exit(f"--dataset={_DATASET.value}: {error}")
    num_examples = len(data.x_train)
    if _LOT_SIZE.value > num_examples:
        sys.exit(f"--lot_size={_LOT_SIZE.value}: {data.name} has {num_examples} training records.")
    sampling_probability = _LOT_SIZE.value / num_examples
    delta, budget, sigma = _TARGET_DELTA.value, {}, None
    if _TARGET_EPSILON.value is not None:
        budget = {"target_epsilon": _TARGET_EPSILON.value, "target_delta": delta}
    elif private:
        sigma = _NOISE_MULTIPLIER.value or 4.0
    if _MAX_EPSILON.value is not None and sigma is not None:
        first_step = dp.accounting.epsilon(sigma, sampling_probability, 1, delta)
        if first_step > _MAX_EPSILON.value:
            sys.exit(
                f"--max_epsilon={_MAX_EPSILON.value}: the first step alone costs ε = "
                f"{first_step:.4g}. Raise it, or the noise, or lower --lot_size."
            )

    default_dir = f"runs/{data.name}_{_MODEL.value}_{_OPTIMIZER.value}".replace(":", "_")
    log_dir = pathlib.Path(_LOG_DIR.value or default_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(_SEED.value)  # weights; the noise has its own, secret key
    model = build_model(_MODEL.value, data.x_train.shape[1:], data.num_classes)
    num_parameters = model.count_params()
    if private:
        model = dp.DPModel(model)
    model.compile(
        optimizer=build_optimizer(sigma),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        # What is logged of a private run is covered by ε, or comes from the test data.
        **({"log_raw_metrics": False, **budget} if private else {}),
    )
    steps_done = []
    callbacks = [
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: steps_done.append(int(model.optimizer.iterations))
        ),
        # "batch": ε after every step, as `batch_epsilon`.
        keras.callbacks.TensorBoard(log_dir, write_graph=False, update_freq="batch"),
    ]
    if private:
        callbacks.append(dp.PrivacyCallback(delta, max_epsilon=_MAX_EPSILON.value))
    started = time.perf_counter()
    history = model.fit(
        data.x_train,
        data.y_train,
        batch_size=_LOT_SIZE.value,
        epochs=_EPOCHS.value,
        validation_data=(data.x_test, data.y_test),
        callbacks=callbacks,
        verbose=1 if sys.stdout.isatty() else 2,
    ).history
    seconds = time.perf_counter() - started
    if budget:
        sigma = model.optimizer.noise_multiplier

    figure = log_dir / "accuracy_epsilon.png"
    title = f"{data.name}, {_MODEL.value}, {_OPTIMIZER.value}"
    if private:
        title += f", L = {_LOT_SIZE.value}, σ* = {sigma:.4g}"
    plot(steps_done, history["val_accuracy"], history.get("epsilon"), title, figure)
    return {
        "dataset": data.name,
        "model": _MODEL.value,
        "parameters": num_parameters,
        "optimizer": _OPTIMIZER.value,
        "accuracy": history["val_accuracy"][-1],
        "epsilon": model.epsilon(delta) if private else None,
        "epsilon_pld": model.epsilon(delta, "pld") if private else None,
        "delta": delta if private else None,
        "noise_multiplier": sigma,
        "l2_norm_clip": _L2_NORM_CLIP.value if private and _clips() else None,
        "sampling_probability": sampling_probability if private else None,
        "lot_size": _LOT_SIZE.value,
        "learning_rate": float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)),
        "steps": steps_done[-1],
        "seconds": round(seconds, 2),
        "seed": _SEED.value,
        "reproducible_noise": _REPRODUCIBLE_NOISE.value,
        "versions": versions(),
        "figure": str(figure),
    }


def _clips():
    """Tells whether the optimizer has a clip norm; AUTO-S divides each gradient by its own."""
    return _OPTIMIZER.value != "autosgd"


def _check_flags_fit_optimizer():
    """Refuses privacy flags on a run without privacy; warns of flags that have no effect."""
    optimizer = _OPTIMIZER.value
    if optimizer == "nonprivate":
        for holder in (_NOISE_MULTIPLIER, _TARGET_EPSILON, _MAX_EPSILON):
            if holder.value is not None:
                sys.exit(
                    f"--{holder.name}={holder.value} with --optimizer=nonprivate: that run has no "
                    f"privacy. Leave the flag out, or choose one of {', '.join(_PRIVATE)}."
                )
    if not _clips() and _L2_NORM_CLIP.present:
        sys.exit(
            f"--l2_norm_clip={_L2_NORM_CLIP.value} with --optimizer={optimizer}, which divides "
            "every gradient by its own norm. Leave the flag out."
        )
    for holder in (_CLIPPING, _LOCAL_CLIP_FACTOR):
        if holder.value is not None and optimizer not in _ADAPTIVE_NOISE:
            sys.exit(
                f"--{holder.name}={holder.value} with --optimizer={optimizer}: only "
                f"{' and '.join(_ADAPTIVE_NOISE)} have it. Leave the flag out."
            )
    if _LOCAL_CLIP_FACTOR.value is not None and _CLIPPING.value != "local":
        logging.warning(
            "--local_clip_factor=%g has an effect with --clipping=local only.",
            _LOCAL_CLIP_FACTOR.value,
        )


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: flags start with --.")
    _check_flags_fit_optimizer()
    print(json.dumps(train()), flush=True)


if __name__ == "__main__":
    app.run(main)
