"""The errors that a user can cause and mend, and what they quote of others."""

from __future__ import annotations

import reprlib

MAX_REASON = 300  # characters of another library's message
_MAX_SHOWN = 60  # characters of a value in an error


class LlmcError(Exception):
    """A user's error: one sentence that names the thing, the value and the way out.

    The command line prints it without a traceback and exits with 2 (bad usage or bad input).
    """


class CheckFailed(LlmcError):
    """The work ran, and what it found fails a check: the command line exits with 1."""


def shortened(text: str, most: int = 64) -> str:
    """A text on one line, cut at a word and with an ellipsis where it has more characters."""
    line = " ".join(text[:4 * most + 1].split())
    if len(line) <= most and len(text) <= 4 * most:
        return line
    words, _, rest = line[:most + 1].rpartition(" ")
    if words and len(rest) <= most // 2:
        return words.rstrip(",;:.(") + " …"
    return line[:most] + "…"


def reason_of(error: BaseException) -> str:
    """The first line of another library's error, shortened; its repr where it says nothing."""
    lines = str(error).strip().splitlines()
    return shortened(lines[0] if lines else repr(error), MAX_REASON)


class _Shown(reprlib.Repr):
    """A value's repr, in which long texts are cut at a word."""

    def repr_str(self, x: str, level: int) -> str:
        return repr(shortened(x, _MAX_SHOWN))


_SHOWN = _Shown()
_SHOWN.maxother = _MAX_SHOWN


def shown(value: object) -> str:
    """A value as an error shows it, shortened."""
    try:
        return _SHOWN.repr(value)
    except ValueError:
        return "a number of many digits"
