"""A tiny workload, and rows as step_time.py makes them, without measuring."""

from benchmarks import harness, models, step_report
from benchmarks.workloads import PLAIN, Workload

TINY = Workload("mlp", "tiny", lambda: models.mlp(6, 4, 10), models.Features((6,)), lot_size=16)


def make_results(path):
    return harness.Results(path, key=step_report.KEY, one_machine=True)


def fake_time_rows(workload, contenders, steps, repeats):
    for contender in (*PLAIN, *contenders):
        yield {
            "measure": "time",
            **workload.fields(),
            **contender.fields(),
            "steps": steps,
            "repeats": repeats,
            "step_ms": 30.0,
            "ms_per_example": 0.05,
            "ratio": 3.0,
            "ratio_range": [2.5, 3.5],
        }


def fake_memory_row(workload, contender, steps):
    return {
        "measure": "memory",
        **workload.fields(),
        **contender.fields(),
        "steps": steps,
        "memory_mb": {"keras": 80.0, "keras:noxla": 50.0}.get(contender.method, 100.0),
        "data_mb": 18.0,
    }
