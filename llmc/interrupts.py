"""Ctrl-C handling around libraries that swallow KeyboardInterrupt."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN = 0.05  # seconds before an interrupt that a callback lost is sent again

_received = False


def check_interrupted() -> None:
    """Raise KeyboardInterrupt if a library swallowed one.

    Raises:
        KeyboardInterrupt: a SIGINT arrived inside the outermost `interruptible` block.
    """
    if _received:
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """Context in which a SIGINT always ends the block with KeyboardInterrupt.

    This holds also where a library catches the interrupt and continues, or raises another error
    instead. Blocks may be nested. The context does nothing outside the main thread, and nothing
    where the program handles SIGINT itself.
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
    """Resend an interrupt that Python prints and drops: in a destructor or a callback from C."""
    if isinstance(error.exc_value, KeyboardInterrupt):
        threading.Timer(_AGAIN, _send_again).start()
    else:
        sys.__unraisablehook__(error)


def _send_again() -> None:
    if _received:  # and the block has not ended
        _thread.interrupt_main()
