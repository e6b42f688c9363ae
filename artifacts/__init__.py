"""The format of a case directory, shared by the compiler and the runtime."""
