"""The errors that a user can cause and mend."""


class LlmcError(Exception):
    """A user's error: one sentence that names the thing, the value and the way out.

    The command line prints it without a traceback and exits with 2 (bad usage or bad input).
    """


class CheckFailed(LlmcError):
    """The work ran, and what it found fails a check: the command line exits with 1."""
