"""Load and run case directories. Imports neither torch nor transformers nor onnx."""
