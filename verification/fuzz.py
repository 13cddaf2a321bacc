"""Random trainings: each either trains soundly or is refused before anything is released.

    python -m verification.fuzz --models=500 --lots=10 --seed=0

A case is a random model, precision, data, lots, optimizer and arguments, a third of them with one
mistake or extreme (`fuzzing/cases.py`); what must hold of it is stated, and checked, in
`fuzzing/check.py`. Cases run in processes of their own, a dozen each, so that one that ends its
process, or never ends, is a finding like another. Results go to `results/fuzz.json` and are kept:
a later call runs what is missing, and what another version of the cases made different. Ends with
status 1 where a case failed. `--only=17,205` runs single cases and prints all there is to know. A
case takes about 10 s on a quiet core.
"""

import argparse
import collections
import concurrent.futures
import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time

from benchmarks import harness
from verification.fuzzing.cases import draw_case

_MARK = "fuzz result: "
_PER_PROCESS = 12


def digest(case):
    """A short name of a case."""
    return hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:12]


def work(lots):
    """Runs the cases that come in on standard input, one per line."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from verification.fuzzing import check

    for line in sys.stdin:
        print(_MARK + json.dumps(check.run(json.loads(line), lots)), flush=True)


class _Worker:
    """A process that runs cases."""

    def __init__(self, lots):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verification.fuzz", "--work", f"--lots={lots}"],
            cwd=harness.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines, self._errors = queue.Queue(), collections.deque(maxlen=30)
        self._readers = [
            threading.Thread(target=_read, args=pair, daemon=True)
            for pair in (
                (self._process.stdout, self._lines.put),
                (self._process.stderr, self._errors.append),
            )
        ]
        for reader in self._readers:
            reader.start()

    def run(self, case, seconds):
        """The result of one case; None where the process has to be given up, and why."""
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                line = self._lines.get(timeout=0.5)
            except queue.Empty:
                continue
            if line is None:
                status = self._process.wait()
                text = "".join(e for e in self._errors if e)[-500:]
                return None, f"the process ended with status {status}: {text}"
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK)), None
        return None, f"no result after {seconds} s"

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(5)


def _read(stream, put):
    with stream:
        for line in stream:
            put(line)
    put(None)


class _Slot:
    """Runs one case after the other: a process for a dozen, and a new one where one was lost."""

    def __init__(self, lots, seconds):
        self._lots, self._seconds = lots, seconds
        self._worker, self._left = None, 0

    def row(self, index, case):
        """The row of a case."""
        if not self._left:
            self.close()
            self._worker, self._left = _Worker(self._lots), _PER_PROCESS
        result, ended = self._worker.run(case, self._seconds)
        self._left -= 1
        if result is None:
            result, self._left = {"outcome": "failed", "message": ended}, 0
        row = {"index": index, "digest": digest(case), **result}
        if result["outcome"] == "failed":
            row["case"] = case
        return row

    def close(self):
        if self._worker is not None:
            self._worker.close()


def run(numbered, lots, *, seconds=1200, workers=1):
    """Runs cases, given as pairs (index, case), `workers` at a time; yields rows as they come."""
    slots = queue.SimpleQueue()
    for _ in range(workers):
        slots.put(_Slot(lots, seconds))

    def row(pair):
        slot = slots.get()
        try:
            return slot.row(*pair)
        finally:
            slots.put(slot)

    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        waiting = [pool.submit(row, pair) for pair in numbered]
        for done in concurrent.futures.as_completed(waiting):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)
        for _ in range(workers):
            slots.get().close()


def summary(rows, cases):
    """Counts of outcomes, of refusals by kind, and of what was covered."""
    refused = [row for row in rows if row["outcome"] == "refused"]
    trained = [row for row in rows if row["outcome"] == "trained"]
    moved = [row["moved"] for row in trained if row["moved"] is not None]

    def count(values):
        return dict(collections.Counter(map(str, values)).most_common())

    return {
        "cases": len(rows),
        "outcomes": count(row["outcome"] for row in rows),
        "traced": sum(row["outcome"] != "refused" or row["stage"] == "fit" for row in rows),
        "steps": sum(row["steps"] for row in trained),
        "engines": count(row["engine"] for row in trained),
        "policies": count(cases[row["index"]]["policy"] for row in trained),
        "optimizers": count(cases[row["index"]]["optimizer"] for row in trained),
        "lots": count(cases[row["index"]]["lots"] for row in trained),
        "sensitivity": {
            "measured": len(moved),
            "largest": max(moved, default=None),
            "above 0.9": sum(m > 0.9 for m in moved),
        },
        "refused": count(f"{row['error']}: {_prefix(row['message'])}" for row in refused),
        "refused_without_a_mistake": count(
            f"{row['error']}: {_prefix(row['message'])}"
            for row in refused
            if cases[row["index"]]["trouble"] is None
        ),
        "failed": [row["index"] for row in rows if row["outcome"] == "failed"],
    }


def _prefix(message):
    """The beginning of a message, without what differs from case to case."""
    return re.sub(r"[-+]?\d[\d.e+-]*|'[^']*'", "·", message)[:70]


def _stored(path, lots):
    if not path.exists():
        return []
    stored = json.loads(path.read_text())
    if stored["lots"] != lots:
        return []
    # Earlier versions did not say how many steps were trained.
    return [row for row in stored["rows"] if row["outcome"] != "trained" or "steps" in row]


def _write(path, lots, seed, rows, cases):
    command = f"python -m verification.fuzz --models={len(cases)} --lots={lots} --seed={seed}"
    found = summary(rows, cases)
    harness.write(path, rows, command=command, lots=lots, seed=seed, summary=found)


def main():
    parser = harness.parser(__doc__, __file__)
    parser.add_argument("--models", type=harness.count, default=500)
    parser.add_argument("--lots", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="cases at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--only", help="indices to run; prints them and writes nothing")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    lots, seed = arguments.lots, arguments.seed
    if arguments.work:
        work(lots)
        return 0
    if arguments.only:
        wanted = [(i, draw_case(seed, i)) for i in map(int, arguments.only.split(","))]
        for row in run(wanted, lots):
            print(json.dumps({**row, "case": dict(wanted)[row["index"]]}, indent=1), flush=True)
        return 0
    cases = [draw_case(seed, index) for index in range(arguments.models)]
    rows = {
        row["index"]: row
        for row in _stored(arguments.out, lots)
        if row["index"] < len(cases) and row["digest"] == digest(cases[row["index"]])
    }
    missing = [(i, case) for i, case in enumerate(cases) if i not in rows]
    end = time.monotonic() + 60 * arguments.minutes
    for row in run(missing, lots, workers=arguments.workers):
        rows[row["index"]] = row
        _write(arguments.out, lots, seed, [rows[i] for i in sorted(rows)], cases)
        if row["outcome"] == "failed":
            print(f"case {row['index']} failed: {row['message']}", flush=True)
        if time.monotonic() > end:
            break
    counted = summary(list(rows.values()), cases)
    print(json.dumps(counted, indent=1))
    return 1 if counted["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
