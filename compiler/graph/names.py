"""Tensor names that the frontend assigns and passes rely on."""

HIDDEN_STATE = "hidden_states.{}"  # after that layer
ENCODER_OUTPUT = "encoder_output"
AFTER_IMAGE = "after_image"  # factor of each token, where layers attend to images: 1 or 0
# Positions of tokens, of models that have several by axis: frame, row and column.
POSITION_IDS = ("position_ids", "position_ids_1", "position_ids_2")
SCALED = ".scaled"  # suffix of a tensor that calibration divides by channel scales
PIXEL_VALUES = "pixel_values"  # of images, as processors name them
# Outputs of an image encoder while passes run, bool [num_patches]: patches of padding, whose rows
# are arbitrary.
PADDING_ROWS = "padding_rows."  # a number follows
