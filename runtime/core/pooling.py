"""Requests to embedding models and classifiers, and what their rows mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from llmc.artifacts.manifest import Manifest, PoolingInfo
from llmc.errors import LlmcError, shown
from llmc.runtime.core.request import PreparedParams, Request
from llmc.runtime.core.scheduler import SequenceOutput
from llmc.runtime.core.step import SamplingState
from llmc.runtime.prompts import read_token_ids
from llmc.runtime.sampling.params import SamplingParams, is_unicode, listed, whole

_PARAMS = PreparedParams(SamplingParams(), frozenset(), [])
Text = str | Sequence[int]


class TextTooLong(LlmcError):
    """A text has more tokens than the model takes."""


@dataclass(frozen=True)
class Classification:
    """Scores of a text, a pair of texts, or a token.

    Args:
        label: of the highest score.
        scores: of each label in `PoolingInfo.labels`, after the model's activation.
    """

    label: str
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Input:
    """A tokenized text, or pair of texts.

    Args:
        token_ids: with special tokens.
        token_type_ids: 0 in the first text, 1 in the second; empty: all 0.
    """

    token_ids: Sequence[int]
    token_type_ids: Sequence[int] = ()


@dataclass(eq=False)
class RunningPooling:
    """A request whose row is being computed."""

    request: Request
    num_cached_tokens: int = 0

    def state(self, tokens: Sequence[int]) -> SamplingState:
        """Sampling state for admission: nothing is sampled."""
        return SamplingState(None)

    def take(self, output: SequenceOutput) -> Pooled:
        """Return the request's result.

        Raises:
            LlmcError: an element is NaN or infinite.
        """
        assert output.pooled is not None
        return Pooled(self, require_finite(output.pooled))


def require_finite(row: np.ndarray) -> np.ndarray:
    """Return a row of the model's output.

    Raises:
        LlmcError: an element is NaN or infinite.
    """
    if not np.isfinite(row).all():
        raise LlmcError("the model's output has NaN or infinite elements; check its weights, or "
                        "compile with a wider --dtype")
    return row


@dataclass(frozen=True)
class Pooled:
    """The result of a request: float32 [width], or [num_tokens, width] of a token classifier."""

    owner: RunningPooling
    row: np.ndarray
    finish_reason: str = "stop"


class PoolingProcessor:
    """Tokenizes inputs of a model that pools, and interprets its rows.

    Args:
        manifest: of the model.
        tokenizer: None if it was compiled without one.
        max_tokens: maximum length of an input.
        render: renders messages by the chat template.
    """

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer | None, max_tokens: int,
                 render: Callable[[Sequence[Mapping[str, object]]], str]) -> None:
        self._manifest, self._tokenizer, self.max_tokens = manifest, tokenizer, max_tokens
        self._render = render

    def info(self, task: str, *tasks: str) -> PoolingInfo:
        """Return the model's task.

        Args:
            task: what the caller asks for.
            tasks: tasks of models that can do it.

        Raises:
            LlmcError: the model has another task.
        """
        info = self._manifest.pooling
        name = self._manifest.source.architecture
        if info is None:
            raise LlmcError(f"'{name}' generates text and has no {task}; use generate, or compile "
                            f"the model with --task {tasks[0]}")
        if info.task not in tasks:
            raise LlmcError(f"'{name}' was compiled for task {info.task}, which has no {task}; use "
                            f"{_METHODS[info.task]}, or a model for task {' or '.join(tasks)}")
        return info

    def prompt(self, info: PoolingInfo, name: str | None) -> str:
        """Text to prepend: the prompt with a name, or the default one.

        Raises:
            LlmcError: the model has no such prompt.
        """
        name = info.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in info.prompts:
            raise LlmcError(f"prompt_name is {shown(name)}; the model has "
                            f"{', '.join(info.prompts) or 'no prompts'}")
        return info.prompts[name]

    def inputs(self, texts: Sequence[Text], truncate: int | None = None,
               prompt: str = "") -> list[Input]:
        """Tokenize texts; token ids are taken as they are.

        Args:
            texts: one or several.
            truncate: longest input in tokens, -1 for the model's maximum; longer ones lose their
                end. None: they are refused.
            prompt: text to prepend to texts.

        Raises:
            LlmcError: a text is empty, too long, or of another type.
        """
        most = self._most(truncate)
        for index, text in enumerate(texts):
            if isinstance(text, str):
                _check_text(text, f"text {index}")
        strings = [prompt + text for text in texts if isinstance(text, str)]
        encoded = iter(self._encode(strings, most) if strings else ())
        return [next(encoded) if isinstance(text, str) else
                self._of_tokens(read_token_ids(text, f"text {index}"), most, f"text {index}")
                for index, text in enumerate(texts)]

    def pairs(self, pairs: Iterable[tuple[str, str]], truncate: int | None = None) -> list[Input]:
        """Tokenize pairs of texts; see `inputs`. The longer text of a pair is truncated first."""
        given = list(pairs)
        for index, pair in enumerate(given):
            for text in pair:
                _check_text(text, f"a text of pair {index}")
        info = self._manifest.pooling
        if info is None or not info.pair_template:
            return self._encode(given, self._most(truncate)) if given else []
        if truncate is not None:
            raise LlmcError("truncate_prompt_tokens is given, but the model reads a pair in its "
                            "chat template, which would lose its end; shorten the texts")
        # The template writes the special tokens.
        return self._encode([self._render([
            {"role": "query", "content": query}, {"role": "document", "content": document}])
            for query, document in given], None, False) if given else []

    def scored(self, query: object, documents: object, truncate: int | None) -> list[Input]:
        """Tokenize the arguments of `LLM.score`.

        Returns:
            Pairs for a reranker; for an embedding model the query, then the documents.
        """
        info = self.info("score", "classify", "embed")
        require_one_label(info)
        text, others = read_scoring(query, documents)
        if info.task == "classify":
            return self.pairs([(text, other) for other in others], truncate)
        return self.inputs([text, *others], truncate)

    def _most(self, truncate: int | None) -> int | None:
        """Maximum number of tokens after truncation; None: no truncation."""
        if truncate is None:
            return None
        try:
            most = whole(truncate)
        except (TypeError, ValueError) as error:
            raise LlmcError(f"truncate_prompt_tokens is {shown(truncate)}; give {error}") from None
        if most != -1 and not 1 <= most <= self.max_tokens:
            raise LlmcError(f"truncate_prompt_tokens {most} is not from 1 to {self.max_tokens}, "
                            f"nor -1 for the model's maximum")
        return self.max_tokens if most == -1 else most

    def _encode(self, texts: Sequence[str | tuple[str, str]], most: int | None,
                add_special_tokens: bool = True) -> list[Input]:
        if self._tokenizer is None:
            raise LlmcError("this model was compiled without a tokenizer; give token ids instead "
                            "of text, or compile it again with its tokenizer.json")
        tokenizer = self._tokenizer
        if most is not None:
            tokenizer = Tokenizer.from_str(tokenizer.to_str())
        try:
            if most is not None:
                tokenizer.enable_truncation(most)
            encodings = tokenizer.encode_batch_fast(
                texts, add_special_tokens=add_special_tokens)
        except BaseException as error:  # a panic of tokenizers is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise LlmcError(f"the tokenizer cannot encode the text ({error})") from error
        made = [Input(own.ids, own.type_ids if any(own.type_ids) else ()) for own in encodings]
        for index, own in enumerate(made):
            self._check(own.token_ids, f"text {index}")
        return made

    def _of_tokens(self, ids: list[int], most: int | None, name: str) -> Input:
        ids = ids if most is None else ids[:most]
        self._check(ids, name)
        vocab_size = self._manifest.dims.vocab_size
        bad = next((token for token in ids if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise LlmcError(f"token id {shown(bad)} is not in the vocabulary of {vocab_size}")
        return Input(ids)

    def _check(self, ids: Sequence[int], name: str) -> None:
        if not len(ids):
            raise LlmcError(f"{name} is empty; give at least one token")
        if len(ids) > self.max_tokens:
            raise TextTooLong(f"{name} has {len(ids)} tokens, the model takes at most "
                              f"{self.max_tokens}; shorten it, give truncate_prompt_tokens -1, or "
                              f"compile with a larger --max_seq_len")

    def requests(self, inputs: Sequence[Input]) -> list[Request]:
        """Return a request for each input, whose `index` it has, the shortest first.

        Texts of a step are then of similar length.
        """
        reads_types = any(tensor.name == "token_type_ids"
                          for tensor in self._manifest.chips[0].inputs)
        return [Request(index, own.token_ids, own.token_ids, _PARAMS, 1, {},
                        token_type_ids=own.token_type_ids if reads_types else ())
                for index, own in sorted(enumerate(inputs),
                                         key=lambda item: len(item[1].token_ids))]


_METHODS = {"embed": "embed", "classify": "classify", "token_classify": "classify"}


def read_texts(texts: object) -> list[Text]:
    """Read one text or several, each a text or token ids.

    Raises:
        LlmcError: the value is of another type.
    """
    if isinstance(texts, str):
        return [texts]
    try:
        each = listed(texts)
    except TypeError:
        raise LlmcError(f"texts is {shown(texts)}; give a text, a list of token ids, or a list of "
                        f"these") from None
    if each and not isinstance(each[0], str | Sequence | np.ndarray):
        return [read_token_ids(each, "the text")]
    return list(each)


def _check_text(text: object, name: str) -> None:
    if not isinstance(text, str):
        raise LlmcError(f"{name} is {shown(text)}; give a text")
    if not text:
        raise LlmcError(f"{name} is empty; give at least one character")
    if not is_unicode(text):
        raise LlmcError(f"{name} is not valid Unicode; write it as UTF-8")


def vectors(rows: Sequence[np.ndarray], info: PoolingInfo, dimensions: int | None) -> np.ndarray:
    """Stack embeddings, float32 [num_texts, width], shortened to their first `dimensions`.

    Shortened vectors of a model that normalizes are normalized again.

    Raises:
        LlmcError: `dimensions` is not from 1 to the model's width.
    """
    if dimensions is not None:
        try:
            dimensions = whole(dimensions)
        except (TypeError, ValueError) as error:
            raise LlmcError(f"dimensions is {shown(dimensions)}; give {error}") from None
        if not 1 <= dimensions <= info.width:
            raise LlmcError(f"dimensions {dimensions} is not from 1 to {info.width}, the model's "
                            f"width")
    stacked = np.stack(rows) if rows else np.empty((0, info.width), np.float32)
    if dimensions is None or dimensions == info.width:
        return stacked
    short: np.ndarray = stacked[:, :dimensions]
    if info.normalized:
        short = short / np.maximum(np.linalg.norm(short, axis=1, keepdims=True), 1e-12)
    return np.ascontiguousarray(short)


def activated(logits: np.ndarray, info: PoolingInfo) -> np.ndarray:
    """Scores of a classifier's logits, along the last axis."""
    if info.activation == "sigmoid":
        with np.errstate(over="ignore"):
            scores: np.ndarray = 1 / (1 + np.exp(-logits))
        return scores
    if info.activation == "softmax":
        exponents = np.exp(logits - logits.max(-1, keepdims=True))
        return np.asarray(exponents / exponents.sum(-1, keepdims=True))
    return logits


def classifications(row: np.ndarray, info: PoolingInfo) -> \
        Classification | list[Classification]:
    """What a row of logits says: of a text, or of each of its tokens."""
    if row.ndim == 2:
        return [_classification(own, info) for own in activated(row, info)]
    return _classification(activated(row, info), info)


def _classification(scores: np.ndarray, info: PoolingInfo) -> Classification:
    return Classification(info.labels[int(scores.argmax())], tuple(scores.tolist()))


def similarities(query: np.ndarray, documents: np.ndarray) -> list[float]:
    """Cosine similarity of a vector [width] with others [num_documents, width]."""
    norms = np.linalg.norm(documents, axis=1) * np.linalg.norm(query)
    scores: list[float] = (documents @ query / np.maximum(norms, 1e-12)).tolist()
    return scores


def read_scoring(query: object, documents: object) -> tuple[str, list[str]]:
    """Read the arguments of `LLM.score`.

    Raises:
        LlmcError: they are not a text and a list of texts.
    """
    _check_text(query, "query")
    try:
        each = [documents] if isinstance(documents, str) else listed(documents)
    except TypeError:
        raise LlmcError(f"documents is {shown(documents)}; give a list of texts") from None
    for index, text in enumerate(each):
        _check_text(text, f"document {index}")
    return str(query), [str(text) for text in each]


def relevance(rows: Sequence[np.ndarray], info: PoolingInfo) -> list[float]:
    """Scores of pairs by a cross-encoder, or of documents by the vectors of query and documents."""
    if info.task == "embed":
        return similarities(rows[0], np.stack(rows[1:])) if len(rows) > 1 else []
    return [float(activated(row, info)[0]) for row in rows]


def require_one_label(info: PoolingInfo) -> None:
    """Reject a classifier that has no single score.

    Raises:
        LlmcError: it has several labels.
    """
    if info.task == "classify" and info.width != 1:
        raise LlmcError(f"the model has {info.width} labels, and a score needs one; use classify, "
                        f"or a reranker")
