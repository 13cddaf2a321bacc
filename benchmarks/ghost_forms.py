"""Measures where the Gram form of a sequence's gradient norm beats the materialised one.

    python -m benchmarks.ghost_forms

For lengths T and widths i, o: the time per example of an upper bound of ‖Σ_t a_t ⊗ d_t‖ and of the
weighted sum over examples, in both forms, interleaved in one process. The table says which one
`tf_adadp.gradients.forms.sequence_form` chooses and what that loses against the faster one; the
constants of its cost model are the pair that loses least here.
"""

import itertools
import time

import numpy as np
import tensorflow as tf

from benchmarks import harness
from tf_adadp.gradients import forms

LENGTHS = (2, 8, 32, 128, 512)
WIDTHS = ((32, 32), (128, 128), (288, 32), (128, 512), (512, 512), (1152, 128), (1024, 1024))
FORMS = ("gram", "materialized")
_ENTRIES = 2**23  # floats of gradients, Gram matrices and inputs held at once, about


def batch_size(length, rows, columns):
    """Returns the number of examples to measure at once."""
    return int(np.clip(_ENTRIES // max(rows * columns, length * (rows + columns)), 2, 64))


def measure(length, rows, columns, repeats):
    """Milliseconds per example, {form: median}."""
    size = batch_size(length, rows, columns)
    rng = np.random.default_rng(0)
    a = tf.constant(rng.normal(size=(size, length, rows)), tf.float32)
    d = tf.constant(rng.normal(size=(size, length, columns)), tf.float32)
    layout = forms.MatrixLayout((rows, columns), [0])

    def runner(form):
        class Forced(forms.SequenceProducts):
            pass

        Forced.form = form

        @tf.function(autograph=False)
        def run(a, d):
            squares, weighted_sum = Forced(a, d, layout).measure()
            weights = 1.0 / tf.maximum(tf.sqrt(squares), 1.0)
            return tf.reduce_sum(weighted_sum(weights)[0])

        return run

    runs = {form: runner(form) for form in FORMS}
    times = {form: [] for form in FORMS}
    for _ in range(2 + repeats):
        for form, run in runs.items():
            start = time.perf_counter()
            run(a, d).numpy()
            times[form].append(time.perf_counter() - start)
    return {form: 1e3 * float(np.median(t[2:])) / size for form, t in times.items()}


def loss_of_choice(row, entry_cost, gram_cost):
    """Time of the form that these constants choose over that of the faster one."""
    length, rows, columns = row["length"], row["rows"], row["columns"]
    gram = length**2 * (rows + columns + gram_cost) < entry_cost * rows * columns
    chosen = row["gram_ms"] if gram else row["materialized_ms"]
    return chosen / min(row["gram_ms"], row["materialized_ms"])


def best_constants(rows):
    """The pair (cost of an entry, cost of a Gram entry) with the least mean loss."""
    grid = itertools.product((4, 8, 16, 24, 32, 48, 64, 96, 128, 192), (0, 16, 32, 64, 128, 256))
    return min(grid, key=lambda pair: np.mean([loss_of_choice(r, *pair) for r in rows]))


def main():
    parser = harness.resumable(__doc__, __file__)
    parser.add_argument("--repeats", type=harness.count, default=7, help="of each form")
    args = parser.parse_args()
    results = harness.Results(
        args.out, key=("length", "rows", "columns"), one_machine=True, force=args.force
    )
    for length, (rows, columns) in itertools.product(LENGTHS, WIDTHS):
        where = {"length": length, "rows": rows, "columns": columns}
        if not results.find(**where):
            times = measure(length, rows, columns, args.repeats)
            results.put(where | {f"{form}_ms": round(t, 5) for form, t in times.items()})
    constants = (forms.sequence.MATERIALIZED_ENTRY_COST, forms.sequence.GRAM_ENTRY_COST)
    table = []
    for row in results.rows:
        shape = row["length"], row["rows"], row["columns"]
        cells = [f"{row[f'{form}_ms']:.4f}" for form in FORMS]
        loss = loss_of_choice(row, *constants)
        table.append([*map(str, shape), *cells, forms.sequence_form(*shape), f"{loss:.2f}"])
    header = ["T", "i", "o", "gram, ms", "formed, ms", "chosen", "loss"]
    print(harness.markdown_table(header, table))
    best = best_constants(results.rows)
    for name, pair in (("in use", constants), ("best here", best)):
        losses = [loss_of_choice(row, *pair) for row in results.rows]
        print(f"{name}: {pair}, mean loss {np.mean(losses):.3f}, greatest {max(losses):.2f}")


if __name__ == "__main__":
    main()
