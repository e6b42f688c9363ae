"""Whether a compiled model is right, and how good it is."""
