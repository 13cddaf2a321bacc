"""Serves the measurements in every peer's environment, on Python's library and NumPy.

A script is called with a model, a mode and a number of steps, trains that long on random data and
prints one line of JSON: {"step_ms": [...], "memory_mb": ..., "data_mb": ..., "versions": {...}}.
"""

import argparse
import importlib.metadata
import json
import pathlib
import sys
import time

import numpy as np

SETTLING_STEPS = 2
L2_NORM_CLIP = 1.0
NOISE_MULTIPLIER = 4.0
LEARNING_RATE = 0.01
SHAPES = {"mlp": (784,), "cnn": (28, 28, 1)}


def parse_arguments(modes):
    """The command line of a peer's script.

    Args:
        modes: names of the ways in which the library can clip.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(SHAPES), required=True)
    parser.add_argument("--mode", choices=list(modes), required=True)
    parser.add_argument("--lot_size", type=int, required=True, help="examples of every step")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--examples", type=int, help="of the data; by default 10 lots")
    args = parser.parse_args()
    args.examples = args.examples or 10 * args.lot_size
    if args.examples < args.lot_size:
        parser.error(f"--examples={args.examples} are fewer than --lot_size={args.lot_size}.")
    return args


def measure(args, train, packages):
    """Trains and prints what it took.

    Call it after importing the library and running one operation: memory counts from here.

    Args:
        args: of `parse_arguments`.
        train: a function `train(lots, steps)` that makes the model, trains it on the lots in
            turns, and returns the time (`time.perf_counter`) at the end of every step. Lots are
            `x, y` with x of floats [lots, lot_size, *shape] and y of integers [lots, lot_size].
        packages: whose versions to report.
    """
    before = peak_memory_mb()
    rng = np.random.default_rng(0)
    shape = (args.examples // args.lot_size, args.lot_size)
    x = rng.random((*shape, *SHAPES[args.model]), dtype=np.float32)
    y = rng.integers(10, size=shape)
    ends = train((x, y), SETTLING_STEPS + args.steps)
    result = {
        "step_ms": [round(float(ms), 3) for ms in 1e3 * np.diff(ends)[SETTLING_STEPS - 1 :]],
        "memory_mb": round(peak_memory_mb() - before, 1),
        "data_mb": round((x.nbytes + y.nbytes) / 2**20, 1),
        "versions": {package: importlib.metadata.version(package) for package in packages},
    }
    print(json.dumps(result))


def run_steps(step, lots, steps):
    """Calls `step(x, y)`, which returns when its work is done, with the lots in turns.

    Returns:
        The time at the end of every step.
    """
    ends = []
    for index in range(steps):
        lot = index % len(lots[0])
        step(lots[0][lot], lots[1][lot])
        ends.append(time.perf_counter())
    return ends


def peak_memory_mb():
    """The largest resident set of this process so far, MiB.

    Not `ru_maxrss` where Linux offers better: that figure survives `exec`, so a child would start
    at its parent's peak.
    """
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    import resource

    units_per_mb = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units_per_mb
