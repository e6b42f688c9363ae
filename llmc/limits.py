"""Limits that the compiler, the artifact format and the runtime share."""

from __future__ import annotations

MAX_CHIPS = 4096
MAX_POSITIONS = 2**27  # of a sequence; Llama 4 Scout has 10,485,760
MAX_SEQUENCES = 65536  # of a step: each has a slot, on the host too
