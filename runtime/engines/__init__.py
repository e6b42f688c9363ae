"""Engines, which execute one rank of a model."""

BLOCK_SIZE = 16  # positions of a block of the KV cache
MAX_TOKENS = 4096  # packed tokens of a step with TensorRT, unless one prompt is longer
MAX_SCORED = 64  # scored prompt tokens of a step that every engine supports
MAX_LOGITS = 512  # rows of logits of a step that every engine supports
