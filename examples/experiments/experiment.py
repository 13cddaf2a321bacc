"""Serves the experiments: flags made of main's arguments, a table on stdout, a figure file.

The experiments import TensorFlow, and what else takes long to load, where they use it, so that
--help does not wait for it.
"""

import inspect
import pathlib
import sys

from absl import app, flags

_DEFINE = {int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}


def run(main, **help_texts):
    """Runs a script's main with absl flags, one per argument, of its default's type and value.

    Flags are defined here and not on import, so that one process can import all experiments.
    """
    texts = {"seed": "Seed of all that is drawn.", "out": "Where the figure goes.", **help_texts}
    names = {}
    for name, parameter in inspect.signature(main).parameters.items():
        define = _DEFINE[type(parameter.default)]
        limits = {} if define is flags.DEFINE_string else {"lower_bound": 0}
        names[name] = define(name, parameter.default, texts[name], **limits)
        # So that --help, which lists the flags of the main module, lists them.
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

    def start(argv):
        if len(argv) > 1:
            raise app.UsageError(f"unknown arguments {argv[1:]}: flags start with --.")
        main(**{name: holder.value for name, holder in names.items()})

    app.run(start)


def print_table(header, rows):
    """Prints rows of strings and numbers as columns; numbers get four significant digits."""
    cells = [[c if isinstance(c, str) else f"{c:.4g}" for c in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def new_figure(columns=1, rows=1):
    """A figure and the flat list of its panels; no display is needed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, 3.8 * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def save(figure, out):
    """Writes a PNG, and the folder it goes to."""
    path = pathlib.Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"figure: {path}")
