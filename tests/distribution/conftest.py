"""Makes the scripts of benchmarks/ importable, as running one of them does."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
