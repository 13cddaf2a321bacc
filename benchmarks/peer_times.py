"""Step times and memory of other libraries, each in its own environment and process.

    python -m benchmarks.peers.environments
    python -m benchmarks.step_time --peers --methods=dpsgd,adadp --engines=auto

Models, loss, clipping norm, noise multiplier and optimizer (SGD) are the same, lots are of a fixed
size and cut in advance. A block is a process that starts, compiles, drops the first steps and
prints the times of the others. Before each block, private or peer's, come blocks of plain Keras,
which its ratio refers to, so that it depends little on what the machine does meanwhile.
"""

import dataclasses
import json
import os
import pathlib
import subprocess

import numpy as np

from benchmarks.peers import environments
from benchmarks.workloads import Contender

ENVS_DIR = environments.DIR
_SCRIPTS = pathlib.Path(__file__).resolve().parent / "peers"


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library's script in peers/, and its modes on each model."""

    script: str
    modes: dict[str, tuple[str, ...]]


PEERS = {
    "tf_privacy": Peer(
        "run_tf_privacy.py",
        {
            # Fast clipping has no rule for convolutions.
            "mlp": ("fast", "fast_xla", "model", "model_xla"),
            "cnn": ("model", "model_xla"),
        },
    ),
    "opacus": Peer("run_opacus.py", {"mlp": ("ghost", "plain"), "cnn": ("ghost", "plain")}),
    "jax_privacy": Peer(
        "run_jax_privacy.py",
        {
            # The perceptron's whole lot at once takes a hundred times as long on a CPU.
            "mlp": ("microbatch_1", "microbatch_32"),
            "cnn": ("microbatch_1", "microbatch_32", "whole"),
        },
    ),
}
MODELS = tuple(dict.fromkeys(model for peer in PEERS.values() for model in peer.modes))


class PeerBlock:
    """A function `block(steps)` that trains in a process of the peer's environment.

    Args:
        command: the script and its arguments without the number of steps.
    """

    def __init__(self, command):
        self._command = command
        self._outputs = []

    def __call__(self, steps):
        """Milliseconds of so many steps.

        Raises:
            RuntimeError: with the end of what the script said, if it failed.
        """
        # PYTHONPATH would mix another environment's packages in.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [*self._command, f"--steps={steps}"]
        child = subprocess.run(command, capture_output=True, text=True, env=environment)
        if child.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {child.stderr[-2000:]}")
        self._outputs.append(json.loads(child.stdout.splitlines()[-1]))
        return np.array(self._outputs[-1]["step_ms"])

    def memory_fields(self):
        """Peak memory in MiB above the imported library, the median over the blocks so far."""
        peaks = [output["memory_mb"] for output in self._outputs]
        last = self._outputs[-1]
        return {
            "memory_mb": round(float(np.median(peaks)), 1),
            "data_mb": last["data_mb"],
            "versions": last["versions"],
        }


def peer_contenders(workload, envs):
    """The peers' blocks for a workload, a dict {Contender: PeerBlock}.

    Args:
        workload: a `Workload` whose name is in MODELS.
        envs: the folder of the environments.

    Raises:
        FileNotFoundError: an environment is not there.
    """
    blocks = {}
    for name, peer in PEERS.items():
        python = environments.python_of(envs, name)
        if not python.exists():
            raise FileNotFoundError(
                f"{name} has no environment: there is no {python}. Make it with "
                f"`python -m benchmarks.peers.environments --dir={envs} {name}`."
            )
        for mode in peer.modes.get(workload.name, ()):
            blocks[Contender(f"{name}:{mode}")] = PeerBlock(
                [
                    str(python),
                    str(_SCRIPTS / peer.script),
                    f"--model={workload.name}",
                    f"--mode={mode}",
                    f"--lot_size={workload.lot_size}",
                    f"--examples={workload.num_examples}",
                ]
            )
    return blocks
