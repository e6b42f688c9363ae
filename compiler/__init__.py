"""The compiler: a Hugging Face model to a case directory."""
