"""Names of tensors that the frontend gives and passes know."""

HIDDEN_STATE = "hidden_states.{}"  # after that layer
ENCODER_OUTPUT = "encoder_output"
