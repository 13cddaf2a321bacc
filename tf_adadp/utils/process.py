"""Tells processes apart, so that objects of one process notice a fork."""

import os

_process = object()


def token() -> object:
    """Returns an object that stands for this process. A child of `os.fork` has another one."""
    return _process


def _forked():
    global _process
    _process = object()


if hasattr(os, "register_at_fork"):  # nothing forks where it is missing
    os.register_at_fork(after_in_child=_forked)
