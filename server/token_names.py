"""Names of tokens in OpenAI's log-probabilities of completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def token_names(tokens: Sequence[int], read_bytes: Callable[[int], bytes]) -> dict[int, str]:
    """A distinct name for each token id: its text, or `bytes:…` where its bytes are no whole
    characters, as OpenAI writes it; or its id where an earlier token has that name.
    """
    names: dict[str, int] = {}
    for token in dict.fromkeys(tokens):
        name = _name(read_bytes(token))
        names[name if name and name not in names else f"token_id:{token}"] = token
    return {token: name for name, token in names.items()}


def _name(made: bytes) -> str:
    try:
        return made.decode()
    except UnicodeDecodeError:
        return f"bytes:{made.decode(errors='backslashreplace')}"
