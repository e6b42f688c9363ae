"""llmc's CUDA engine, compiled: `_cuda`, and with TensorRT's headers libllmc_plugins.so."""
