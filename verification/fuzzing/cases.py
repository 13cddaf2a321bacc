"""Descriptions of random trainings, as JSON: model, precision, data, lots, optimizer, arguments.

No TensorFlow here: descriptions are cheap, and are sent to the processes that run them.
"""

import zlib

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

VECTOR = (
    "dense", "dense", "dense", "relu", "regularized", "activity", "residual", "shared", "einsum",
    "layer_norm", "group_norm", "rms_norm", "batch_norm_frozen", "unit_norm", "dropout", "noise",
    "frozen_dense", "float64_dense", "half_dense", "own_layer", "added_loss", "lambda_mix", "lora",
)  # fmt: skip
IMAGE = (
    "conv", "conv", "depthwise", "separable", "transposed", "max_pool", "group_norm", "layer_norm",
    "dropout", "spatial_dropout", "flip",
)  # fmt: skip
SEQUENCE = (
    "conv", "depthwise", "separable", "lstm", "gru", "rnn", "unrolled_lstm", "bidirectional",
    "time_distributed", "attention", "dense", "layer_norm", "dropout", "masking",
)  # fmt: skip
REFUSED = ("batch_norm", "normalization", "stateful", "writes_state")
INPUTS = ("vector", "vector", "image", "sequence", "tokens", "tokens_masked")
POLICIES = (
    "float32", "float32", "float32", "mixed_bfloat16", "mixed_float16", "float64", "bfloat16",
    "float16", "floatx_float64",
)  # fmt: skip
LOTS = ("arrays", "arrays", "poisson", "truncated", "fixed", "shuffled", "users", "declared")
OPTIMIZERS = (
    ("DPSGD", {}),
    ("DPSGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("DPSGD", {"l2_norm_clip": {"": 0.5}, "use_ema": True, "ema_overwrite_frequency": 3}),
    ("DPSGD", {"automatic_clipping": 0.05, "clipnorm": 1.0}),
    ("DPSGD", {"microbatch_size": 3}),
    ("DPSGD", {"augmentation_multiplicity": 2}),
    ("DPAdam", {"amsgrad": True}),
    ("DPAdam", {"global_clipnorm": 0.5, "seed": 4}),
    ("DPRMSprop", {"momentum": 0.5, "centered": True}),
    ("ADADP", {}),
    ("ADADP", {"clipping": "local", "warmup_steps": 2}),
    ("ADADP", {"automatic_clipping": 0.1}),
    ("ADADP", {"prior": "raw"}),
    ("ADADP", {"microbatch_size": 2}),
    ("ADAN", {}),
    ("ADAN", {"clipping": "local"}),
    ("AdaCliP", {}),
    ("AdaCliP", {"scale": "free"}),
    ("DPOPT", {}),
    ("DPOPT", {"clipping": "local"}),
    ("DPOPT", {"pruning": 0.5, "directions": "uniform"}),
    ("DPOPT", {"directions": "budgeted", "direction_noise_multiplier": 3.0}),
    ("DPOPT", {"variant": "printed"}),
    ("AutoSGD", {"momentum": 0.5}),
    ("SADPSGD", {}),
    ("AGD", {}),
    ("Nadam", {}),
    ("Adadelta", {}),
    ("Adafactor", {}),
    ("Ftrl", {}),
    ("Lion", {}),
    ("Adamax", {}),
)
# One mistake, or one extreme of what is allowed. Both kinds are here: the property is the same.
TROUBLES = (
    "batch_size_none", "batch_size_zero", "batch_size_too_large", "batch_size_text",
    "batch_size_nan", "batch_size_fraction", "labels_out_of_range", "labels_negative",
    "labels_nan", "labels_text", "labels_missing", "labels_short", "labels_wide", "labels_deep",
    "x_empty", "x_text", "x_object", "x_wrong_width", "x_missing", "x_complex", "x_wrong_structure",
    "weights_short", "weights_text", "weights_deep", "class_weight_list", "class_weight_missing",
    "loss_unknown", "loss_reduces_batch", "loss_none", "loss_for_other_outputs", "loss_writes",
    "metric_named_epsilon", "noise_negative", "noise_zero", "noise_nan", "clip_zero", "clip_huge",
    "clip_tiny", "clip_unknown_prefix", "rate_nan", "rate_negative", "optimizer_plain",
    "optimizer_text", "accumulation", "microbatch_zero", "jit_text", "eager_and_jit",
    "physical_zero", "engine_text", "steps_per_execution_zero", "steps_per_execution_text",
    "epochs_zero", "steps_zero", "all_frozen", "frozen_later", "early_stopping", "shuffle_false",
    "dataset", "generator", "strategy", "validation_split_one", "gamma_negative",
)  # fmt: skip
_OPERATIONS_IN = 8  # one of so many cases has raw operations between its layers


def _layers(names, most):
    width = st.integers(1, 5)
    layer = st.tuples(st.sampled_from(names), width).map(list)
    return st.lists(layer, min_size=0, max_size=most)


@st.composite
def cases(draw):
    """One training, a dict of JSON values; all but its seed."""

    def one(*values):
        return draw(st.sampled_from(values))

    def rarely(times_in_20):
        return draw(st.integers(0, 19)) >= 20 - times_in_20

    branches = []
    for _ in range(one(1, 1, 1, 2)):
        kind = one(*INPUTS)
        names = {"vector": VECTOR, "image": IMAGE}.get(kind, SEQUENCE)
        branches.append(
            {
                "input": kind,
                "layers": draw(_layers(names, 2 if kind != "vector" else 1)),
                "end": one("flatten", "pool"),
                "unknown_length": rarely(3),
            }
        )
    heads = [
        {
            "task": one("sparse", "sparse", "onehot", "binary", "regression", "sequence"),
            "from_logits": one(True, True, False),
            "loss": one("object", "object", "text", "function", "sum", "none"),
            "label_dtype": one("int32", "int64", "uint8", "float32", "float64"),
        }
        for _ in range(one(1, 1, 1, 2))
    ]
    several = len(branches) > 1, len(heads) > 1
    model = {
        "style": one("functional", "functional", "sequential", "subclassed", "nested"),
        "branches": branches,
        "trunk": draw(_layers(VECTOR, 2)),
        "heads": heads,
        "inputs": one("list", "dict") if several[0] else one("single", "single", "dict"),
        "outputs": one("list", "dict") if several[1] else one("single", "single", "dict"),
        "wide": rarely(1),
        "refused": one(*REFUSED) if rarely(2) else None,
    }
    rows = one(40, 40, 40, 23, 7, 2, 1)
    name, arguments = one(*OPTIMIZERS)
    return {
        "model": model,
        "policy": one(*POLICIES),
        "rows": rows,
        "lots": one(*LOTS),
        "fraction": one(0.5, 0.5, 0.25, 1.0, 0.02),  # of the rows, in a lot, expected
        "x_dtype": one(*["float32"] * 6, "float64", "float16", "uint8"),
        "poison": one(None, None, None, "nan", "inf", "huge", "zeros"),
        "weights": one(None, None, None, "plain", "zeros", "huge", "negative", "nan", "class"),
        "optimizer": name,
        "arguments": arguments,
        "noise_multiplier": one(0.5, 1.0, 4.0, 100.0),
        "learning_rate": one(None, None, 1e-3, "schedule"),
        "engine": one("auto", "auto", "auto", "vectorized", "ghost"),
        "physical_batch_size": one(None, None, 1, 3, 16),
        "jit_compile": True if rarely(1) else one("auto", False, False),
        "eager": rarely(1),
        "steps_per_execution": one(1, 1, 1, 1, 3),
        "metrics": one(None, "accuracy"),
        "trouble": one(*TROUBLES) if rarely(7) else None,
    }


def draw_case(seed, index):
    """Case `index` of the series `seed`, the same for the same version of hypothesis.

    Drawn by itself: in one long run hypothesis would vary earlier draws, and which ones would
    depend on how many are asked for. The first draw of a run is the simplest, so it takes three.
    """
    found = []

    @hypothesis_seed(f"{seed} {index}")
    @settings(
        max_examples=3,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def collect(case):
        found.append(case)

    collect()
    # Large integers are not for hypothesis to draw: it tries those that it finds in whatever
    # modules happen to be imported.
    number = zlib.crc32(f"{seed} {index}".encode())
    case = {"seed": number, **found[-1]}
    if number % _OPERATIONS_IN == 0:
        _add_operations(case["model"], number // _OPERATIONS_IN)
    return case


def _add_operations(model, number):
    """Puts drawn operations into one of a model's chains of layers."""
    chains = [model["trunk"], *(branch["layers"] for branch in model["branches"])]
    chain = chains[number % len(chains)]
    chain.insert(number % (len(chain) + 1), ["operations", number])
