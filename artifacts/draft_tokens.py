"""Token ids of a draft model with a smaller vocabulary than its model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmc.artifacts.manifest import DRAFT_TOKEN_IDS
from llmc.artifacts.weight_file import read_weight_header
from llmc.errors import LlmcError


def read_draft_token_ids(path: Path, rows: int, vocab_size: int) -> np.ndarray:
    """Read the token id of each row of a draft model's logits, int64 [rows].

    Args:
        path: the weight file.
        rows: of the draft model's logits.
        vocab_size: of the model.

    Raises:
        LlmcError: they are missing, or not token ids of the model.
    """
    weight = read_weight_header(path).get(DRAFT_TOKEN_IDS)
    if weight is not None and weight.dtype == "int64" and weight.shape == (rows,):
        ids = np.fromfile(path, np.int64, rows, offset=weight.start)
        if ids.min() >= 0 and ids.max() < vocab_size:
            return ids
    raise LlmcError(f"'{path}' has no weight '{DRAFT_TOKEN_IDS}' with {rows} token ids of the "
                    f"draft model's logits below {vocab_size}; compile the model again")
