"""The tokenizer of a case directory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from llmc.artifacts.case_files import read_bounded
from llmc.artifacts.manifest import MANIFEST_NAME, Manifest
from llmc.errors import LlmcError

_MAX_BYTES = 64 << 20  # Gemma's tokenizer of 262,144 tokens has 33 MB
_MAX_TOKEN_ID = 2**24
_MAX_ADDED = 1024  # special tokens added to a text
_MAX_EXPANSION = 4096  # factor by which replacements lengthen a text; SentencePiece's is 3
_SEQUENCES = ("normalizers", "pretokenizers", "decoders")


def load_tokenizer(manifest: Manifest, case_dir: Path) -> Tokenizer | None:
    """Load the tokenizer; None if the model has none.

    Raises:
        LlmcError: tokenizer.json is invalid, or names an EOS token and the manifest lists none.
    """
    if manifest.tokenizer.path is None:
        return None
    directory = case_dir / manifest.tokenizer.path
    tokenizer = read_tokenizer(directory)
    end = named_end(directory, tokenizer, manifest.dims.vocab_size)
    if end is not None and not manifest.tokenizer.eos_token_ids:
        raise LlmcError(f"the tokenizer in '{directory}' has the EOS token {end}, "
                        f"{MANIFEST_NAME} lists no eos_token_ids; compile the model again")
    return tokenizer


def read_tokenizer(directory: Path) -> Tokenizer:
    """Read a tokenizer.json, without its truncation and padding.

    Raises:
        LlmcError: it is invalid, or exceeds a limit of size or expansion.
    """
    path = directory / "tokenizer.json"
    try:
        data = read_bounded(path, _MAX_BYTES)
    except OSError as error:
        raise LlmcError(f"'{path}' cannot be read ({error}); compile the model again") from error
    try:
        tokenizer = Tokenizer.from_buffer(data)
        tokenizer.no_truncation()  # transformers' default
        tokenizer.no_padding()
        _check_size(tokenizer)
    except BaseException as error:  # a panic of tokenizers is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise LlmcError(f"'{path}' is not a tokenizer ({error}); compile the model again") \
            from error
    return tokenizer


def _check_size(tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer for which a short text may exhaust memory.

    Raises:
        ValueError: it has no tokens, a huge token id, many special tokens per text, or long
            replacements of characters.
        LlmcError: it cannot encode an empty text.
    """
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise ValueError("it has no tokens")
    if max(ids) > _MAX_TOKEN_ID:
        raise ValueError(f"it has the token id {max(ids)}, the limit is {_MAX_TOKEN_ID}")
    added = len(encode(tokenizer, [""], add_special_tokens=True)[0])
    if added > _MAX_ADDED:
        raise ValueError(f"it adds {added} tokens to every text, the limit is {_MAX_ADDED}")
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        texts = [text for own in _components(getattr(tokenizer, name))
                 for text in (own.get("content"), own.get("prepend")) if isinstance(text, str)]
        times = math.prod(max(1, len(text)) for text in texts)
        if times > _MAX_EXPANSION:
            raise ValueError(f"its {name} may make a text {times} times longer, the limit is "
                             f"{_MAX_EXPANSION}")


def named_end(directory: Path, tokenizer: Tokenizer, vocab_size: int) -> int | None:
    """The EOS token that tokenizer_config.json names; None if absent or not in the vocabulary."""
    named = read_config(directory).get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    token = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return token if token is not None and token < vocab_size else None


def read_config(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; empty if it is absent or not an object.

    Raises:
        LlmcError: it cannot be read.
    """
    path = directory / "tokenizer_config.json"
    try:
        config = json.loads(read_bounded(path, _MAX_BYTES)) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise LlmcError(f"'{path}' cannot be read ({error}); compile the model again") from error
    return config if isinstance(config, dict) else {}


def encode(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    """Tokenize without the GIL, which `Tokenizer.encode` holds.

    Raises:
        LlmcError: the tokenizer fails, for example because its regular expression exceeds a limit.
    """
    try:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    except BaseException as error:  # a panic of tokenizers is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise LlmcError(f"the tokenizer cannot encode the text ({error})") from error
    return [encoding.ids for encoding in encodings]


def min_tokens(tokenizer: Tokenizer) -> Callable[[str], int]:
    """Return a function that computes a lower bound of a text's tokens from its size.

    The bound is 0 if unknown. It exists for BPE over bytes: each byte of a text is part of a token,
    except bytes that the vocabulary lacks, which are dropped.
    """
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    dropped = _dropped_bytes(tokenizer, vocab)
    longest = max(len(token.encode()) for token in vocab) * _shortening(tokenizer)
    if dropped is None or not longest:
        return lambda text: 0
    return lambda text: int(len(text.encode().translate(None, dropped)) // longest)


def _dropped_bytes(tokenizer: Tokenizer, vocab: Container[str]) -> bytes | None:
    """Bytes that the vocabulary lacks; None if others may be dropped as well."""
    if not isinstance(tokenizer.model, BPE) or tokenizer.truncation is not None or any(
            own.lstrip or own.rstrip  # such a token consumes any number of spaces
            for own in tokenizer.get_added_tokens_decoder().values()):
        return None
    if any(own["type"] == "ByteLevel" for own in _components(tokenizer.pre_tokenizer)):
        return bytes(byte for byte, own in bytes_to_unicode().items() if own not in vocab)
    whole = tokenizer.model.byte_fallback and all(f"<0x{own:02X}>" in vocab for own in range(256))
    return b"" if whole else None


def _shortening(tokenizer: Tokenizer) -> int:
    """Factor by which normalization may shorten a text; 0 if unbounded."""
    times = 1
    for own in _components(tokenizer.normalizer):
        if own["type"] in ("NFC", "NFKC"):
            times = 4  # composed characters are shorter, by less than this
        elif own["type"] not in ("Prepend", "NFD", "NFKD") and not (
                own["type"] == "Replace" and "String" in own["pattern"]
                and len(own["content"].encode()) >= len(own["pattern"]["String"].encode())):
            return 0
    return times


def bytes_to_unicode() -> dict[int, str]:
    """Characters that represent bytes in GPT-2's and all byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable},
            **{byte: chr(256 + index) for index, byte in enumerate(others)}}


def _components(component: Any) -> Iterator[dict[str, Any]]:
    """The components of a normalizer, pre-tokenizer or decoder, with sequences flattened.

    Each is an object as in tokenizer.json.
    """
    states = [] if component is None else [json.loads(component.__getstate__())]
    while states:
        state = states.pop()
        parts = next((state[key] for key in _SEQUENCES if key in state), None)
        if parts is None:
            yield state
        else:
            states += reversed(parts)


# In a child process.


@cache
def load_for_texts(path: Path) -> tuple[Tokenizer, Callable[[str], int]]:
    """Load a tokenizer and its `min_tokens`."""
    tokenizer = read_tokenizer(path.parent)
    return tokenizer, min_tokens(tokenizer)


def tokenize_long(path: Path, text: str, add_special_tokens: bool, limit: int) -> \
        tuple[int, list[int]]:
    """Tokenize a text, unless its size implies more than `limit` tokens.

    Returns:
        The number of tokens or a lower bound of it, and the tokens if they are at most `limit`.
    """
    tokenizer, lower_bound = load_for_texts(path)
    if lower_bound(text) > limit:
        return lower_bound(text), []
    ids, = encode(tokenizer, [text], add_special_tokens)
    return len(ids), ids if len(ids) <= limit else []
