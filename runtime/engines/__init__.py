"""Engines: what executes one rank of a model."""

BLOCK_SIZE = 16  # positions of a block of the KV cache
MAX_TOKENS = 4096  # packed tokens of a step that a TensorRT plan takes, unless one prompt is longer
MAX_SCORED = 64  # prompt tokens of a step whose log-probabilities every engine has room for
MAX_LOGITS = 512  # rows of logits that every engine has room for in a step
