"""Errors that a user can cause and fix, and the formatting of quoted values."""

from __future__ import annotations

import reprlib

MAX_REASON = 300  # characters of another library's message
_MAX_SHOWN = 60  # characters of a value in an error


class LlmcError(Exception):
    """An error in a user's input: the value given, the value expected, and what to do.

    The command line prints it without a traceback and exits with code 2.
    """


class CheckFailed(LlmcError):
    """A check that ran and failed; the command line exits with code 1."""


def shortened(text: str, max_chars: int = 64) -> str:
    """Shorten a text to one line of `max_chars` characters, cut at a word, with an ellipsis."""
    line = " ".join(text[:4 * max_chars + 1].split())
    if len(line) <= max_chars and len(text) <= 4 * max_chars:
        return line
    words, _, rest = line[:max_chars + 1].rpartition(" ")
    if words and len(rest) <= max_chars // 2:
        return words.rstrip(",;:.(") + " …"
    return line[:max_chars] + "…"


def reason_of(error: BaseException) -> str:
    """Return the shortened first line of another library's error, or its repr if it is empty."""
    lines = str(error).strip().splitlines()
    return shortened(lines[0] if lines else repr(error), MAX_REASON)


def reason_of_file(error: BaseException) -> str:
    """The system's reason why a file cannot be used, without its path; else as `reason_of`."""
    return getattr(error, "strerror", None) or reason_of(error)


class _Shown(reprlib.Repr):
    """A repr that cuts long strings at a word."""

    def repr_str(self, x: str, level: int) -> str:
        return repr(shortened(x, _MAX_SHOWN))


_SHOWN = _Shown()
_SHOWN.maxother = _MAX_SHOWN


def shown(value: object) -> str:
    """Format a value for an error message, shortened."""
    try:
        return _SHOWN.repr(value)
    except ValueError:
        return "a number of many digits"
