"""The format of a case directory, on which the compiler and the runtime both stand."""
