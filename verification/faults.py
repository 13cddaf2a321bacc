"""Serves the programs that inject faults: their flags, and clusters on this machine."""

import json
import os
import socket
import subprocess

from benchmarks import harness


def parser(doc, script, faults, number):
    """Returns an ArgumentParser for --<faults>=<number>, --seed and --out."""
    made = harness.parser(doc, script)
    made.add_argument(f"--{faults}", type=harness.count, default=number)
    made.add_argument("--seed", type=int, default=0)
    return made


def write(path, summary, rows):
    """Stores what was found, and prints the summary."""
    harness.write(path, rows, summary=summary)
    print(json.dumps(summary))


def start_cluster(commands, outputs, **options):
    """Starts one process per command, each a worker of one cluster over the loopback device.

    Args:
        commands: lists of arguments; the first is the chief's.
        outputs: where each writes what it prints, files or `subprocess.PIPE`.
        options: further ones of `subprocess.Popen`.
    """
    held = [socket.socket() for _ in commands]
    for s in held:
        s.bind(("127.0.0.1", 0))
    cluster = {"worker": [f"127.0.0.1:{s.getsockname()[1]}" for s in held]}
    for s in held:
        s.close()
    started = []
    for number, (command, output) in enumerate(zip(commands, outputs, strict=True)):
        task = {"cluster": cluster, "task": {"type": "worker", "index": number}}
        env = {**os.environ, "TF_CONFIG": json.dumps(task), "TF_CPP_MIN_LOG_LEVEL": "3"}
        started.append(subprocess.Popen(command, env=env, stdout=output, stderr=output, **options))
    return started
