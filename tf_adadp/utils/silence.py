"""Silences NumPy where it works on private records."""

import numpy as np


def silent() -> np.errstate:
    """Makes a context without NumPy's warnings, as of a cast that overflows.

    They depend on the records, and may be turned into errors.
    """
    return np.errstate(all="ignore")
