"""Hugging Face model to case directory."""
