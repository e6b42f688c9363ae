"""The text and the bytes of single tokens."""

from __future__ import annotations

import re
from functools import lru_cache

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # a decoder's text for bytes that are not valid UTF-8
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token's text as it reads after other text; U+FFFD for each part of a character.

    Special tokens have their own text.
    """
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    if REPLACEMENT in text:
        return text
    # A decoder may treat the start of a text differently: sentencepiece's drops a space.
    twice: str = tokenizer.decode([token, token], skip_special_tokens=False)
    return twice[len(text):] if twice.startswith(text) and twice != text else text


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """A token's bytes, even if they are only part of a character."""
    text = token_text(tokenizer, token)
    if REPLACEMENT not in text:
        return text.encode()
    name: str = tokenizer.id_to_token(token) or text
    if match := _BYTE_FALLBACK.fullmatch(name):
        return bytes([int(match[1], 16)])
    table = _byte_level()
    return bytes(table[char] for char in name) if all(char in table for char in name) \
        else text.encode()


@lru_cache(maxsize=1)
def _byte_level() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | \
        {chr(0x100 + index): byte for index, byte in enumerate(others)}
