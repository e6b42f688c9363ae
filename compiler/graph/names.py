"""Names of tensors that the frontend gives and passes know."""

HIDDEN_STATE = "hidden_states.{}"  # after that layer
ENCODER_OUTPUT = "encoder_output"
SCALED = ".scaled"  # what the name ends in of what calibration has divided, to multiply it later
