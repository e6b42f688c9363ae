"""Quantized weights: schemes, code types, calibration, and the checkpoints that have them."""
