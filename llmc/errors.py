"""The errors that a user can cause and mend."""


class LlmcError(Exception):
    """A user's error: one sentence that names the thing, the value and the way out.

    The command line prints it without a traceback and exits with 2 (bad usage or bad input).
    """


class CheckFailed(LlmcError):
    """The work ran, and what it found fails a check: the command line exits with 1."""


def shortened(text: str, limit: int = 64) -> str:
    """Cut a text to `limit` characters, at a word where there is one, and mark it by an ellipsis.
    """
    if len(text) <= limit:
        return text
    cut = text[:limit - 1]
    words, _, rest = cut.rpartition(" ")
    return (words if len(rest) < limit // 2 else cut).rstrip() + "…"
