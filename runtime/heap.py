"""Python's heap while models run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exempt what is alive from garbage collection within the context.

    Collections would traverse all modules and models again and again while there are many requests:
    15 ms each in a server, and half of the time of thousands of short texts on a GPU. The end of
    one context ends the exemption of all.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def freeze_again() -> None:
    """Collect garbage, and exempt what is left, after one of several contexts has ended."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
