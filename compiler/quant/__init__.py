"""Quantized weights: schemes, code types, calibration, and readers of quantized checkpoints."""
