"""Plans a privacy budget before any training: ε over epochs, δ(ε), and every bound.

    python examples/privacy_budget.py --num_examples=60000 --lot_size=600 --noise_multiplier=1.1
    python examples/privacy_budget.py --target_epsilon=2 --epochs=20
    python examples/privacy_budget.py --target_epsilon=2 --pca_noise_multiplier=7

Needs no TensorFlow and no data. Writes budget.png (ε after every epoch; δ as a function of ε at the
end), bounds.png (ε over steps by every bound) and budget.json (all figures) to --output_dir, prints
their names and, last, the table of bounds. Lots are Poisson, neighbours differ by adding or
removing one record; the rows for fixed-size lots are for replacing one, at half the noise
multiplier.
"""

import json
import math
import pathlib
import sys

import numpy as np
from absl import app, flags
from dp_accounting import GaussianDpEvent

from tf_adadp import accounting

_NUM_EXAMPLES = flags.DEFINE_integer(
    "num_examples", 60000, "Number N of training records, public.", lower_bound=1
)
_LOT_SIZE = flags.DEFINE_integer(
    "lot_size", 600, "Expected lot size L; every step draws each record with L/N.", lower_bound=1
)
_EPOCHS = flags.DEFINE_integer("epochs", 10, "Epochs of ceil(N / L) steps.", lower_bound=1)
_NOISE_MULTIPLIER = flags.DEFINE_float(
    "noise_multiplier",
    None,
    "Noise standard deviation over clip norm. Default 1.1, unless --target_epsilon is given.",
)
_TARGET_EPSILON = flags.DEFINE_float(
    "target_epsilon", None, "Finds the least noise multiplier for which everything costs at most ε."
)
_TARGET_DELTA = flags.DEFINE_float("target_delta", 1e-5, "δ; must lie below 1/N to mean anything.")
_PCA_NOISE_MULTIPLIER = flags.DEFINE_float(
    "pca_noise_multiplier", None, "Noise of a DPPCA on the same records before training."
)
_ACCOUNTANT = flags.DEFINE_enum(
    "accountant", "rdp", accounting.ACCOUNTANTS, "Which bound --target_epsilon is for."
)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/privacy_budget", "Where figures go.")

flags.mark_flags_as_mutual_exclusive(["noise_multiplier", "target_epsilon"])
for _holder in (_NOISE_MULTIPLIER, _TARGET_EPSILON, _PCA_NOISE_MULTIPLIER):
    flags.register_validator(
        _holder,
        lambda value: value is None or 0 < value < math.inf,
        message="give a finite number above 0.",
    )
flags.register_validator(
    _TARGET_DELTA, lambda delta: 0 < delta < 1, message="give a number between 0 and 1."
)


def released_before():
    """A ledger of what is released before training: DPPCA, if asked for."""
    ledger = accounting.PrivacyLedger()
    if _PCA_NOISE_MULTIPLIER.value is not None:
        ledger.add(GaussianDpEvent(_PCA_NOISE_MULTIPLIER.value), origin="DPPCA")
    return ledger


def choose_noise_multiplier(law, steps):
    """σ* from --noise_multiplier, or calibrated to --target_epsilon for all steps."""
    if _TARGET_EPSILON.value is None:
        return 1.1 if _NOISE_MULTIPLIER.value is None else _NOISE_MULTIPLIER.value
    return released_before().calibrate_noise_multiplier(
        _TARGET_EPSILON.value, _TARGET_DELTA.value, law, steps, _ACCOUNTANT.value
    )


def plot(epochs, epsilons, ledger, path):
    """Writes ε after every epoch, and δ against ε of the whole plan, as a PNG."""
    from matplotlib.figure import Figure  # here, so that --help does not wait for it

    delta = _TARGET_DELTA.value
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(epochs, epsilons, "o-", markersize=3)
    left.set_xlabel("epochs")
    left.set_ylabel(f"ε at δ = {delta:g} (RDP)")
    left.set_ylim(bottom=0)
    for accountant in ("rdp", "pld"):
        grid = np.linspace(0, 2 * epsilons[-1], 41)
        try:
            deltas = [ledger.delta(float(epsilon), accountant) for epsilon in grid]
        except ValueError as error:
            print(f"No δ(ε) by {accountant}: {error}", file=sys.stderr)
            continue
        right.semilogy(grid, deltas, label=accountant)
    right.axhline(delta, color="grey", linewidth=0.8, linestyle=":")
    right.set_ylim(bottom=1e-12)
    right.set_xlabel("ε")
    right.set_ylabel("δ(ε) after all epochs")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def plan():
    """Writes the figures and the summary; returns the files and the comparison of all bounds."""
    if _LOT_SIZE.value > _NUM_EXAMPLES.value:
        sys.exit(f"--lot_size={_LOT_SIZE.value}: there are {_NUM_EXAMPLES.value} records.")
    law = accounting.PoissonSampling(_NUM_EXAMPLES.value, _LOT_SIZE.value)
    delta = _TARGET_DELTA.value
    steps_per_epoch = math.ceil(_NUM_EXAMPLES.value / _LOT_SIZE.value)
    steps = _EPOCHS.value * steps_per_epoch
    try:
        sigma = choose_noise_multiplier(law, steps)
    except ValueError as error:
        sys.exit(f"--target_epsilon={_TARGET_EPSILON.value}: {error}")

    ledger, epochs, epsilons = released_before(), range(1, _EPOCHS.value + 1), []
    for _ in epochs:
        ledger.add(law.event(sigma), steps_per_epoch, law=law)
        epsilons.append(ledger.epsilon(delta))
    if _PCA_NOISE_MULTIPLIER.value is None:
        comparison = accounting.compare(sigma, law.probability, steps, delta)
    else:
        comparison = ledger.compare(delta)

    folder = pathlib.Path(_OUTPUT_DIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("budget.png", "bounds.png", "budget.json")]
    plot(epochs, epsilons, ledger, files[0])
    comparison.figure().savefig(files[1], dpi=150)
    summary = {
        "noise_multiplier": sigma,
        "pca_noise_multiplier": _PCA_NOISE_MULTIPLIER.value,
        "sampling_probability": law.probability,
        "steps": steps,
        "delta": delta,
        "epsilon_after_epoch": epsilons,
        "bounds": [
            {
                "name": row.name,
                "lots": row.lots,
                "neighboring_relation": row.neighboring_relation.name,
                "epsilon": row.epsilon,
                "is_guarantee": row.is_guarantee,
            }
            for row in comparison.rows
        ],
    }
    files[2].write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return files, comparison


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: flags start with --.")
    files, comparison = plan()
    print("\n".join(map(str, files)))
    print(f"\n{comparison}", flush=True)


if __name__ == "__main__":
    app.run(main)
