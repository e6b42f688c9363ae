"""Correctness and quality of compiled models: `diff` and `eval`."""
