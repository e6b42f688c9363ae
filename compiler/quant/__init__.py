"""Quantized weights: schemes, code types, calibration, readers of checkpoints."""
