"""Shared machinery of the compiler's passes: rules, probing, lazy weights."""
