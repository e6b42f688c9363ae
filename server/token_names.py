"""Token strings in the log-probabilities of OpenAI's completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def token_names(tokens: Sequence[int], read_bytes: Callable[[int], bytes]) -> dict[int, str]:
    """Return a distinct string for each token id.

    It is the token's text; `bytes:…`, as in OpenAI's API, for partial characters; or the token id
    if an earlier token has the same text.
    """
    names: dict[str, int] = {}
    for token in dict.fromkeys(tokens):
        name = _name(read_bytes(token))
        names[name if name and name not in names else f"token_id:{token}"] = token
    return {token: name for name, token in names.items()}


def _name(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return f"bytes:{raw.decode(errors='backslashreplace')}"
