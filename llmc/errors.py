"""The errors that a user can cause and mend, and what they quote of others."""

from __future__ import annotations

_MAX_REASON = 300  # characters of another library's message


class LlmcError(Exception):
    """A user's error: one sentence that names the thing, the value and the way out.

    The command line prints it without a traceback and exits with 2 (bad usage or bad input).
    """


class CheckFailed(LlmcError):
    """The work ran, and what it found fails a check: the command line exits with 1."""


def shortened(text: str, most: int = _MAX_REASON) -> str:
    """A text on one line, cut at a word and with an ellipsis where it has more characters."""
    words, size = text.split(), -1
    for number, word in enumerate(words):
        size += 1 + len(word)
        if size > most:
            kept = " ".join(words[:number]).rstrip(",;:.(")
            return f"{kept} …" if number else f"{word[:most]}…"
    return " ".join(words)


def reason_of(error: BaseException) -> str:
    """The first line of another library's error, shortened; its repr where it says nothing."""
    lines = str(error).strip().splitlines()
    return shortened(lines[0] if lines else repr(error))
