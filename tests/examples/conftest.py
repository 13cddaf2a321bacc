"""The examples are scripts, not a package: their folder goes on the path, as when they are run."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
