"""Hides output, logs and global counters of trials, which would reveal their number."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

import keras
import numpy as np

from tf_adadp.utils.keras_compat import (
    function_number,
    name_counts,
    set_name_counts,
    skip_function_numbers,
)

_FUNCTION_NUMBERS = 2**22


class _Muted:
    """Drops all output written to a stream, until it is told to pass it on.

    Handlers that are made in a trial keep it for good.
    """

    def __init__(self, stream: TextIO):
        self._stream, self.muted = stream, True

    def write(self, text: str) -> int:
        return len(text) if self.muted else self._stream.write(text)

    def unmute(self) -> None:
        self.muted = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Drops output, log lines and warnings of the `with` block; yields a list of the warnings.

    Output of C++ code too: files 1 and 2 of the process lead nowhere meanwhile.
    """
    with contextlib.ExitStack() as stack:
        out, err = _Muted(sys.stdout), _Muted(sys.stderr)
        nowhere = stack.enter_context(open(os.devnull, "wb"))
        for number, stream in ((1, out), (2, err)):
            stream.flush()
            kept = os.dup(number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            os.dup2(nowhere.fileno(), number)
            stack.callback(stream.unmute)
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        yield stack.enter_context(warnings.catch_warnings(record=True))


def show(caught: list[warnings.WarningMessage]) -> None:
    """Gives warnings that `quiet` caught."""
    for w in caught:
        warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)


class FreshStart:
    """Starts every trial from the same counters, and from new random numbers.

    Keras numbers layers and models by how many the process made, TensorFlow functions, and a public
    seed initial weights: they would tell, in the winner, which trial it was, and afterwards how
    many there were. TensorFlow's numbers cannot be set back: they go on 2²² after the start, which
    all trials together must not use up (one of a small model uses about a thousand).

    Args:
        rng: where seeds of the trials come from.
    """

    def __init__(self, rng: np.random.Generator):
        self._rng = rng
        self._before = self._after = name_counts()
        self._first_number = function_number()

    def begin(self) -> None:
        """Begins a trial: resets names, and seeds Python's, NumPy's and TensorFlow's generators."""
        set_name_counts(self._before)
        self._seed()

    def keep_names(self) -> None:
        """Remembers the names of the trial that just ended as those that are taken."""
        self._after = name_counts()

    def end(self) -> None:
        """Ends the search: names go on after those of the trial that was kept."""
        set_name_counts(self._after)
        skip_function_numbers(self._first_number + _FUNCTION_NUMBERS)
        self._seed()

    def _seed(self):
        keras.utils.set_random_seed(int(self._rng.integers(2**32)))
