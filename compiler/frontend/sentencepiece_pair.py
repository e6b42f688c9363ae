"""The tokenizer of a model with one SentencePiece model for what it reads, another for what it
writes, and a vocabulary that numbers the pieces of both, such as Marian's: as one tokenizer.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers.convert_slow_tokenizer import import_protobuf

from llmc.errors import LlmcError

SOURCE, VOCABULARY = "source.spm", "vocab.json"
_END, _PAD, _UNKNOWN = "</s>", "<pad>", "<unk>"
_UNIGRAM = 1
# What the pieces that are only written score, per character, below the worst that is read: never
# better than any way to read the text.
_PENALTY = 20.0


def write_tokenizer(directory: Path, target: Path) -> None:
    """Write tokenizer.json into `target`.

    Raises:
        LlmcError: a file is broken or missing, or it is none of unigrams with one vocabulary.
    """
    pieces = import_protobuf().ModelProto()
    try:
        ids = json.loads((directory / VOCABULARY).read_text(encoding="utf-8"))
        pieces.ParseFromString((directory / SOURCE).read_bytes())
    except Exception as error:  # protobuf's errors share no base class
        raise LlmcError(f"the tokenizer of '{directory}' cannot be read ({error}); put a "
                        f"tokenizer.json there") from error
    tokens = sorted(ids, key=ids.get)
    problem = "has no </s> or no <unk>" if not {_END, _UNKNOWN} <= ids.keys() else \
        "does not number its pieces from 0 on" if sorted(ids.values()) != list(range(len(ids))) \
        else "writes with a vocabulary of its own" if (directory / "target_vocab.json").is_file() \
        else "is not one of unigrams" if pieces.trainer_spec.model_type != _UNIGRAM else None
    if problem is not None:
        raise LlmcError(f"the tokenizer of '{directory}' {problem}, which llmc cannot convert; put "
                        f"a tokenizer.json there")
    read = {piece.piece: piece.score for piece in pieces.pieces if piece.piece in ids}
    worst = min(read.values(), default=0.0) - _PENALTY
    tokenizer = Tokenizer(models.Unigram(
        [(token, read.get(token, worst * max(1, len(token)))) for token in tokens],
        ids[_UNKNOWN]))
    charsmap = pieces.normalizer_spec.precompiled_charsmap
    tokenizer.normalizer = normalizers.Sequence([
        *([normalizers.Precompiled(charsmap)] if charsmap else []),
        normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {_END}", special_tokens=[(_END, ids[_END])])
    tokenizer.add_special_tokens([token for token in (_END, _PAD, _UNKNOWN) if token in ids])
    tokenizer.add_special_tokens([AddedToken(token, rstrip=True, special=True) for token in tokens
                                  if token.startswith(">>") and token.endswith("<<")])
    tokenizer.save(str(target / "tokenizer.json"))
