"""dtypes by the names that options and manifests have for them."""

from __future__ import annotations

import numpy as np


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype of a name, such as bfloat16, which only ml_dtypes has."""
    import ml_dtypes
    return np.dtype(getattr(ml_dtypes, name, name))
