"""Jobs of test_sandbox. A module of its own, as child processes import it."""

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
    """As a native library that recurses without end."""
    ctypes.CDLL(None).memset(0, 0, 1)
