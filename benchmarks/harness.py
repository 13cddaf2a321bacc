"""Serves studies and verification programs: arguments, result files, the machine."""

import argparse
import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
_VERSIONS_OF = ("tf_adadp", "tensorflow", "keras", "numpy", "dp-accounting")


def parser(doc, script):
    """Returns an ArgumentParser that describes a script by its docstring, with --out.

    Args:
        doc: the script's docstring; its first line is shown.
        script: its `__file__`. Results go to results/ beside it, a JSON file of its name.
    """
    script = pathlib.Path(script)
    results = script.parent / "results" / f"{script.stem}.json"
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--out", type=pathlib.Path, default=results, help="the JSON of results")
    return made


def resumable(doc, script):
    """Returns the same for a script that continues its results, with --force."""
    made = parser(doc, script)
    made.add_argument("--force", action="store_true", help="start the results anew")
    return made


def names(known):
    """Returns a parser of names separated by commas, all of which must be known."""

    def parse(text):
        given = text.split(",")
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}.")
        return given

    return parse


def count(text):
    """Parses a whole number of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1.")
    return int(text)


def write(path, rows, **fields):
    """Replaces a JSON file by these fields and rows, one row per line.

    An interrupted write leaves the file as it was.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps(name)}: {_lines(value)},\n" for name, value in fields.items())
    partial = path.with_suffix(".partial")
    partial.write_text(f'{{\n{text}"rows": {_lines(rows)}\n}}\n')
    partial.replace(path)


def _lines(value):
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join("  " + json.dumps(row) for row in value) + "\n]"


def from_process(module, *arguments):
    """Runs `python -m module arguments` in a process of its own, from the repository's root.

    Returns:
        What its last line of output says, read as JSON.

    Raises:
        RuntimeError: with the end of what it said, if it failed.
    """
    command = [sys.executable, "-m", module, *arguments]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if child.returncode:
        said = child.stderr.strip()[-2000:]
        how = f"python -m {module} {' '.join(arguments)} ended with {child.returncode}"
        raise RuntimeError(f"{how}: {said}")
    return json.loads(child.stdout.splitlines()[-1])


def machine():
    """Describes what a figure depends on: processor, cores, memory, GPUs, versions."""
    import tensorflow as tf

    devices = [
        tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name)
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    versions = {"python": platform.python_version()}
    for package in _VERSIONS_OF:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "source"
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": devices,
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


class Results:
    """A JSON file of rows, each a flat dict, that a later run adds to instead of repeating.

    Written anew after every change, one row per line, by replacing the file, so that an
    interrupted run leaves a valid one. Several runs may write one file: each puts its rows to those
    that the others have put meanwhile.

    Args:
        path: the file; it need not exist.
        key: names of the fields that identify a row. A new row replaces the one with its key.
        one_machine: whether rows from another machine or other versions are refused, because
            figures are compared with each other.
        force: forget the rows there are.

    Raises:
        ValueError: with `one_machine`, where the file comes from another machine.
    """

    def __init__(self, path, key, *, one_machine, force=False):
        self.path = pathlib.Path(path)
        self._key = key
        self.machine = machine()
        self.rows, self.runs = [], []
        if force:
            self.path.unlink(missing_ok=True)
        if self.path.exists():
            stored = json.loads(self.path.read_text())
            if one_machine and stored["machine"] != self.machine:
                raise ValueError(
                    f"{self.path} is from another machine or other versions: {stored['machine']}, "
                    f"this is {self.machine}. Give another --out, or --force to start it anew."
                )
            self.rows, self.runs = stored["rows"], stored["runs"]
        script = pathlib.Path(sys.argv[0]).resolve()
        if script.is_relative_to(ROOT):  # python -m gives the file of the module
            script = ".".join(script.relative_to(ROOT).with_suffix("").parts)
            script = script.removesuffix(".__main__")  # of a package
        self._run = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "command": " ".join([f"python -m {script}", *sys.argv[1:]]),
        }

    def find(self, **fields):
        """The first row with these fields, or None."""
        for row in self.rows:
            if all(row.get(name) == value for name, value in fields.items()):
                return row
        return None

    def put(self, row):
        """Adds a row, in place of the one with the same key, and writes the file."""
        key = [row[name] for name in self._key]
        with _locked(self.path.parent):
            if self.path.exists():
                stored = json.loads(self.path.read_text())
                self.rows, self.runs = stored["rows"], stored["runs"]
            self.rows = [r for r in self.rows if [r[name] for name in self._key] != key] + [row]
            if self._run not in self.runs:
                self.runs.append(self._run)
            write(self.path, self.rows, machine=self.machine, runs=self.runs)


@contextlib.contextmanager
def _locked(folder):
    """Keeps other processes out of the same folder's results."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def markdown_table(header, rows):
    """Lines of a Markdown table; cells are turned into text."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _cpu_model():
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
