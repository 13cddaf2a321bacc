"""Private training of models as others write them, against plain Keras.

    python -m benchmarks.real_models
    python -m benchmarks.real_models --models=vae,unet --steps=20 --repeats=5

Per model, with the private optimizers of its entry in zoo.py:

Step time: in turns with plain Keras, block by block, in one process, as in step_time.py.

First fit and memory: every contender in a fresh process, imports excluded, all with the same data.
First fit: from the call of `fit` until its first step is done, tracing and compiling included.
Memory: the peak above what the process held before data and model were made. The process says
besides on which engine the model was trained, and why.

Plain Keras runs with XLA and without; each figure refers to the better of the two. A model that
fails gets a row that says so, and is tried again by the next run. What the JSON holds for the same
settings is not measured again.
"""

import argparse
import contextlib
import importlib
import json
import pathlib
import re
import sys
import time

import keras
import tensorflow as tf

from benchmarks import harness, step_report, step_time
from benchmarks.real_models import report
from benchmarks.real_models.entry import options
from benchmarks.real_models.zoo import MODELS
from benchmarks.workloads import PLAIN, Contender

_MODULE = "benchmarks.real_models"
_SHOWN = ("step_ms", "ratio", "ratio_range", "first_fit_s", "memory_mb", "plan", "error")


def measure_fresh(entry, contender, steps):
    """The first fit and the memory of training in THIS process; call it first and once.

    Args:
        entry: a `RealModel`.
        contender: a `Contender`.
        steps: how many steps follow the first one.
    """
    if entry.needs:
        importlib.import_module(entry.needs)
    before = step_time.memory_of_imports()
    model, *data, loss = entry.make(entry.num_examples)
    model, train = step_time.make_trainer(
        model, contender, data, lot_size=entry.lot_size, options=options(loss), lean=True
    )
    timer = step_time.StepTimer()
    start = time.perf_counter()
    train(1, [timer])
    fields = {"first_fit_s": round(timer.ends[0] - start, 3)}
    train(steps)
    fields |= step_time.memory_fields(before, data)
    if contender not in PLAIN:
        with contextlib.redirect_stdout(sys.stderr):
            plan = model.gradient_plan()
        fields |= {"plan": plan.engine, "reason": plan.reason}
    return fields


def run(entries, steps, repeats, results):
    """Measures what `results` does not hold yet."""
    for entry in entries:
        if not entry.is_available:
            print(f"{entry.name} is skipped: it needs {entry.needs}, the extra `hub`.")
            continue
        settings = {**entry.fields(), "steps": steps}
        contenders = [Contender(method, "auto") for method in entry.methods]

        def is_missing(measure, contender, settings=settings, **more):
            row = results.find(measure=measure, **contender.fields(), **settings, **more)
            return row is None or "error" in row

        if any(is_missing("time", c, repeats=repeats) for c in contenders):
            for row in time_rows(entry, contenders, steps, repeats):
                _put(results, row)
        for contender in (*PLAIN, *contenders):
            if is_missing("fresh", contender):
                _put(results, fresh_row(entry, contender, steps))


def time_rows(entry, contenders, steps, repeats):
    """Rows of the private contenders and of plain Keras, timed in turns in one process."""
    asked = [f"--model={entry.name}", f"--steps={steps}", f"--repeats={repeats}"]
    try:
        return harness.from_process(_MODULE, *asked)
    except RuntimeError as error:
        fields = {**entry.fields(), "steps": steps, "repeats": repeats}
        return [
            {"measure": "time", **fields, **contender.fields(), "error": _what_was_raised(error)}
            for contender in contenders
        ]


def fresh_row(entry, contender, steps):
    """A row of `measure_fresh` in a process of its own."""
    row = {"measure": "fresh", **entry.fields(), **contender.fields(), "steps": steps}
    asked = [f"--model={entry.name}", f"--steps={steps}", f"--method={contender.method}"]
    try:
        return row | harness.from_process(_MODULE, *asked)
    except RuntimeError as error:
        return row | {"error": _what_was_raised(error)}


def _what_was_raised(error):
    """The line of the exception that ended a process, or how it was called and what it wrote."""
    raised = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", str(error), re.MULTILINE)
    return (raised[-1] if raised else str(error))[:300]


def _put(results, row):
    results.put(row)
    step_report.announce(row, *(name for name in _SHOWN if name in row))


def _measure_here(args):
    """Measures one model in this process and prints a line of JSON."""
    keras.utils.set_random_seed(0)
    entry = MODELS[args.model]
    contenders = [Contender(method, "auto") for method in entry.methods]
    if args.method:
        known = {contender.method: contender for contender in (*PLAIN, *contenders)}
        measured = measure_fresh(entry, known[args.method], args.steps)
    else:
        measured = list(step_time.time_rows(entry, contenders, args.steps, args.repeats))
    print(json.dumps(measured))


def parse_arguments(arguments=None):
    """Parses the command line."""
    parser = harness.resumable(__doc__, pathlib.Path(__file__).parent)
    add = parser.add_argument
    add("--models", type=harness.names(MODELS), default=list(MODELS))
    add("--steps", type=harness.count, default=10, help="of one block")
    add("--repeats", type=harness.count, default=3, help="blocks of each contender")
    add("--model", help=argparse.SUPPRESS)  # measures this one in this process and ends
    add("--method", help=argparse.SUPPRESS)  # its first fit and memory instead of step times
    return parser.parse_args(arguments)


def main():
    tf.get_logger().setLevel("ERROR")  # many models in one process: retracing is expected
    args = parse_arguments()
    if args.model:
        _measure_here(args)
        return
    results = harness.Results(args.out, key=report.KEY, one_machine=True, force=args.force)
    run([MODELS[name] for name in args.models], args.steps, args.repeats, results)
    print(report.tables(results))


if __name__ == "__main__":
    main()
