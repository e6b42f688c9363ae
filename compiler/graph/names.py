"""Tensor names that the frontend assigns and passes rely on."""

HIDDEN_STATE = "hidden_states.{}"  # after that layer
ENCODER_OUTPUT = "encoder_output"
SCALED = ".scaled"  # suffix of a tensor that calibration divides by channel scales
