"""dtypes by their names in options and manifests."""

from __future__ import annotations

import numpy as np


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype of a name, including those of ml_dtypes such as bfloat16."""
    import ml_dtypes
    return np.dtype(getattr(ml_dtypes, name, name))
