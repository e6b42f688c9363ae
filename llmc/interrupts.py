"""Ctrl-C that stays Ctrl-C, through libraries that make something else of it."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN = 0.05  # seconds after which an interrupt that a callback has lost is sent once more

_received = False


def check_interrupted() -> None:
    """Raise what a library has swallowed.

    Raises:
        KeyboardInterrupt: there was a SIGINT since the outermost `interruptible` began.
    """
    if _received:
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """A block that a SIGINT ends with KeyboardInterrupt, even where a library catches that and goes
    on, or raises another error in its place.

    Blocks may be nested. In a thread that is not the main one, and where the program handles SIGINT
    itself, nothing is changed.
    """
    global _received
    if threading.current_thread() is not threading.main_thread() or \
            signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    hook = sys.unraisablehook
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _lost
    try:
        yield
        check_interrupted()
    except Exception:
        if _received:
            raise KeyboardInterrupt from None
        raise
    finally:
        _received = False
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _received
    _received = True
    raise KeyboardInterrupt


def _lost(error: sys.UnraisableHookArgs) -> None:
    """An interrupt in a destructor or in a callback from C is printed and forgotten; send another.
    """
    if isinstance(error.exc_value, KeyboardInterrupt):
        threading.Timer(_AGAIN, _send_again).start()
    else:
        sys.__unraisablehook__(error)


def _send_again() -> None:
    if _received:  # and the block has not ended
        _thread.interrupt_main()
