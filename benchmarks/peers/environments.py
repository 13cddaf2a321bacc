"""Makes a virtual environment for each of the other libraries, with fixed versions.

    python -m benchmarks.peers.environments
    python -m benchmarks.peers.environments --dir=/somewhere --python=python3.11 opacus

They cannot share one: TensorFlow Privacy needs a TensorFlow of before Keras 3, and Python 3.11 at
most. An environment that is complete already is left as it is.
"""

import argparse
import pathlib
import subprocess
import sys

DIR = pathlib.Path(__file__).resolve().parents[2] / ".peers"
REQUIREMENTS = {
    "tf_privacy": ("tensorflow==2.15.1", "tensorflow-privacy==0.9.0", "lazy_loader==0.6"),
    "opacus": ("torch==2.15.0", "opacus==1.6.0"),
    "jax_privacy": ("jax==0.10.2", "jax-privacy==2.0.0"),
}


def python_of(folder, peer):
    """The interpreter of a peer's environment."""
    return pathlib.Path(folder) / peer / "bin" / "python"


def is_complete(folder, peer):
    """Tells whether the environment holds what REQUIREMENTS say."""
    marker = pathlib.Path(folder) / peer / "requirements.txt"
    return marker.exists() and marker.read_text().split() == list(REQUIREMENTS[peer])


def make(folder, peer, python):
    """Makes one environment.

    Args:
        folder: where it gets a folder of its own, by the peer's name.
        peer: a name in REQUIREMENTS.
        python: the interpreter to make it from.

    Raises:
        subprocess.CalledProcessError: a package cannot be installed.
    """
    subprocess.run([python, "-m", "venv", str(pathlib.Path(folder) / peer)], check=True)
    pip = [str(python_of(folder, peer)), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *REQUIREMENTS[peer]], check=True)
    marker = pathlib.Path(folder) / peer / "requirements.txt"
    marker.write_text("\n".join(REQUIREMENTS[peer]) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", metavar="peer", help=", ".join(REQUIREMENTS))
    parser.add_argument("--dir", type=pathlib.Path, default=DIR)
    parser.add_argument("--python", default=sys.executable, help="Python 3.11 for tf_privacy")
    args = parser.parse_args()
    for peer in args.peers or REQUIREMENTS:
        if peer not in REQUIREMENTS:
            parser.error(f"{peer!r} is none of {', '.join(REQUIREMENTS)}.")
        if is_complete(args.dir, peer):
            print(f"{peer} is there already.")
        else:
            make(args.dir, peer, args.python)
            print(f"{peer}: {', '.join(REQUIREMENTS[peer])}")


if __name__ == "__main__":
    main()
