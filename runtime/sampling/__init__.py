"""Sampling, structured output and detokenization."""
