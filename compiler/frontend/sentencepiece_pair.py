"""Conversion of a pair of SentencePiece models, such as Marian's, to tokenizer.json.

One model is for the source, one for the target language; they share a vocabulary.
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
# Score per character of target-only pieces, below the worst source piece, so that encoding never
# prefers them.
_PENALTY = 20.0


def write_tokenizer(directory: Path, target: Path) -> None:
    """Write tokenizer.json into `target`.

    Raises:
        LlmcError: a file is broken or missing, or the tokenizer is not a unigram model with a
            shared vocabulary.
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
        "does not number its pieces from 0" if sorted(ids.values()) != list(range(len(ids))) \
        else "has a separate target vocabulary" if (directory / "target_vocab.json").is_file() \
        else "is not a unigram model" if pieces.trainer_spec.model_type != _UNIGRAM else None
    if problem is not None:
        raise LlmcError(f"the tokenizer of '{directory}' {problem}, which llmc cannot convert; put "
                        f"a tokenizer.json there")
    scores = {piece.piece: piece.score for piece in pieces.pieces if piece.piece in ids}
    worst = min(scores.values(), default=0.0) - _PENALTY
    tokenizer = Tokenizer(models.Unigram(
        [(token, scores.get(token, worst * max(1, len(token)))) for token in tokens],
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
