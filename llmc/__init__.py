"""llmc: compile a Hugging Face causal language model ahead of time, and run what came out."""

__version__ = "0.1.0"
