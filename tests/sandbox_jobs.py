"""Jobs of test_sandbox, in a separate module that child processes import."""

import ctypes


def double(value):
    return [value, value]


def fail():
    raise ValueError("a reason,\non two lines")


def spin():
    while True:
        pass


def allocate():
    return len(b"x" * 2**30)


def overflow():
    """Overflow the stack like a native library with unbounded recursion."""
    ctypes.CDLL(None).memset(0, 0, 1)
