"""/v1/embeddings, /rerank, /score, /classify and /pooling, with the fields of OpenAI and vLLM."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import AliasChoices, Field

from llmc.artifacts.manifest import PoolingInfo
from llmc.runtime.core.pooling import (
    Classification,
    Input,
    PoolingProcessor,
    TextTooLong,
    activated,
    classifications,
    relevance,
    require_one_label,
    similarities,
    vectors,
)
from llmc.runtime.core.scheduler import MOST_PRIORITY
from llmc.server.answer import Object
from llmc.server.errors import ApiError
from llmc.server.model import Model
from llmc.server.protocol import Body, Fields, Ints, Refused, Texts

MAX_INPUTS = 2048  # texts of a request, OpenAI's limit
Rows = Sequence[np.ndarray]
EncodingFormat = Literal["float", "base64"]
# One text or several, each a text or token ids.
Inputs = str | Ints | Texts | Annotated[list[Ints], Field(fail_fast=True)]


class PoolingBody(Body):
    """Common fields of requests to embedding models and classifiers."""

    REFUSED: ClassVar[Refused] = {
        "messages": ((None, []), "give the text as input"),
        "activation": ((None, True), "use /pooling for logits"),
        "use_activation": ((None, True), "use /pooling for logits"),
        "softmax": ((None, True), "use /pooling for logits"),
        "normalize": ((None, True), "vectors are as modules.json of the model says"),
        "add_special_tokens": ((None, True), "give token ids"),
    }
    PREFIX: ClassVar[str]

    truncate_prompt_tokens: int | None = None
    priority: int = Field(0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)

    @property
    @abstractmethod
    def texts(self) -> Sequence[str | list[int]]:
        """All texts of the request."""

    @property
    def num_sequences(self) -> int:
        """Number of texts, or of pairs."""
        return len(self.texts)

    @abstractmethod
    def inputs(self, pooling: PoolingProcessor) -> list[Input]:
        """Tokenize the request's texts.

        Raises:
            LlmcError: a text is invalid, or the model has another task.
        """

    @abstractmethod
    def results(self, info: PoolingInfo, rows: Rows) -> Object:
        """Return the answer's results of the inputs' rows, as a field of the answer."""

    def usage(self, tokens: int) -> Object:
        """Return the answer's usage."""
        return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


class InputBody(PoolingBody):
    """A request with `input`: one text or several, each a text or token ids."""

    input: Inputs

    @property
    def texts(self) -> Sequence[str | list[int]]:
        several = [self.input] if isinstance(self.input, str) else [*self.input]
        return [several] if several and isinstance(several[0], int) else several  # type: ignore


class EmbeddingRequest(InputBody):
    """The body of /v1/embeddings; `prompt_name` is llmc's."""

    PREFIX = "embd"

    encoding_format: EncodingFormat = "float"
    dimensions: int | None = Field(None, ge=1)
    prompt_name: str | None = None

    def inputs(self, pooling: PoolingProcessor) -> list[Input]:
        info = pooling.info("embeddings", "embed")
        vectors([], info, self.dimensions)
        return pooling.inputs(self.texts, self.truncate_prompt_tokens,
                              pooling.prompt(info, self.prompt_name))

    def results(self, info: PoolingInfo, rows: Rows) -> Object:
        return {"data": [{"object": "embedding", "index": index,
                          "embedding": _encoded(row, self.encoding_format)}
                         for index, row in enumerate(vectors(rows, info, self.dimensions))]}

    def usage(self, tokens: int) -> Object:
        return {"prompt_tokens": tokens, "total_tokens": tokens}


class PoolingRequest(InputBody):
    """The body of /pooling: rows of the model without an activation."""

    PREFIX = "pool"

    encoding_format: EncodingFormat = "float"
    dimensions: int | None = Field(None, ge=1)

    def inputs(self, pooling: PoolingProcessor) -> list[Input]:
        info = pooling.info("pooling", "embed", "classify", "token_classify")
        if self.dimensions is not None and info.task != "embed":
            raise ApiError(f"dimensions is given, but the model was compiled for task {info.task}; "
                           f"leave it out", param="dimensions")
        vectors([], info, self.dimensions)
        return pooling.inputs(self.texts, self.truncate_prompt_tokens)

    def results(self, info: PoolingInfo, rows: Rows) -> Object:
        made = vectors(rows, info, self.dimensions) if info.task == "embed" else rows
        return {"data": [{"object": "pooling", "index": index,
                          "data": _encoded(row, self.encoding_format)}
                         for index, row in enumerate(made)]}


class ClassifyRequest(InputBody):
    """The body of /classify."""

    PREFIX = "classify"

    def inputs(self, pooling: PoolingProcessor) -> list[Input]:
        pooling.info("classify", "classify", "token_classify")
        return pooling.inputs(self.texts, self.truncate_prompt_tokens)

    def results(self, info: PoolingInfo, rows: Rows) -> Object:
        def described(own: Classification) -> Object:
            return {"label": own.label, "probs": [*own.scores], "num_classes": len(own.scores)}

        data = []
        for index, row in enumerate(rows):
            own = classifications(row, info)
            data.append({"index": index, **(
                {"tokens": [*map(described, own)]} if isinstance(own, list) else described(own))})
        return {"data": data}


class TextDocument(Fields):
    """A document of /rerank."""

    text: str


class RerankRequest(PoolingBody):
    """The body of /rerank, in Jina's and Cohere's form."""

    PREFIX = "rerank"

    query: str
    documents: Annotated[list[str | TextDocument], Field(fail_fast=True)]
    top_n: int | None = Field(None, ge=0)
    return_documents: bool = True
    max_tokens_per_doc: int | None = Field(None, ge=0)

    @property
    def texts(self) -> Sequence[str]:
        return [self.query, *self._documents]

    @property
    def num_sequences(self) -> int:
        return len(self.documents)

    @property
    def _documents(self) -> list[str]:
        return [own if isinstance(own, str) else own.text for own in self.documents]

    def inputs(self, pooling: PoolingProcessor) -> list[Input]:
        if not self.documents:
            raise ApiError("the list of documents is empty; give at least one", param="documents")
        truncate = self.truncate_prompt_tokens
        if truncate is None and self.max_tokens_per_doc:
            truncate = min(self.max_tokens_per_doc, pooling.max_tokens)
        return pooling.scored(self.query, self._documents, truncate)

    def results(self, info: PoolingInfo, rows: Rows) -> Object:
        scores = relevance(rows, info)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        if self.top_n:
            order = order[:self.top_n]
        documents = self._documents
        return {"results": [{
            "index": index, "relevance_score": scores[index],
            **({"document": {"text": documents[index]}} if self.return_documents else {})}
            for index in order]}

    def usage(self, tokens: int) -> Object:
        return {"prompt_tokens": tokens, "total_tokens": tokens}


class ScoreRequest(PoolingBody):
    """The body of /score: one text with each of several, or as many pairs."""

    PREFIX = "score"

    text_1: str | Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: str | Texts = Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))

    @property
    def texts(self) -> Sequence[str]:
        return [text for pair in self._pairs for text in pair]

    @property
    def num_sequences(self) -> int:
        return len(self._pairs)

    @property
    def _pairs(self) -> list[tuple[str, str]]:
        left, right = ([own] if isinstance(own, str) else own for own in (self.text_1, self.text_2))
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right) or not right:
            raise ApiError(f"there are {len(left)} of text_1 and {len(right)} of text_2; give one "
                           f"text_1, or equal numbers", param="text_1")
        return [*zip(left, right, strict=True)]

    def inputs(self, pooling: PoolingProcessor) -> list[Input]:
        info = pooling.info("score", "classify", "embed")
        require_one_label(info)
        pairs = self._pairs
        if info.task == "classify":
            return pooling.pairs(pairs, self.truncate_prompt_tokens)
        left, right = zip(*pairs, strict=True)
        if isinstance(self.text_1, str):
            left = left[:1]
        return pooling.inputs([*left, *right], self.truncate_prompt_tokens)

    def results(self, info: PoolingInfo, rows: Rows) -> Object:
        if info.task == "classify":
            scores = [float(activated(row, info)[0]) for row in rows]
        else:
            count = len(self._pairs)
            left, right = rows[:-count], rows[-count:]
            scores = [similarities(left[index if len(left) > 1 else 0], row[None])[0]
                      for index, row in enumerate(right)]
        return {"data": [{"index": index, "object": "score", "score": score}
                         for index, score in enumerate(scores)]}


def _encoded(row: np.ndarray, form: EncodingFormat) -> list[float] | str:
    """A row as a list of floats, or as base64 of little-endian float32."""
    if form == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers


async def read_inputs(model: Model, body: PoolingBody) -> list[Input]:
    """Tokenize a request's texts in another thread.

    Raises:
        ApiError: there are no texts or too many, or one is too long.
        LlmcError: a text is invalid, or the model has another task.
    """
    texts, count = body.texts, body.num_sequences
    if not texts:
        raise ApiError("the list of texts is empty; give at least one", param="input")
    if count > MAX_INPUTS:
        raise ApiError(f"the request has {count} texts, expected at most {MAX_INPUTS}; send "
                       f"several requests", param="input")
    try:
        return await model.offload.long_work(sum(map(len, texts)),
                                             lambda: body.inputs(model.llm.pooling))
    except TextTooLong as error:
        raise ApiError(str(error), param="input", code="context_length_exceeded") from None


async def answer(model: Model, body: PoolingBody, inputs: Sequence[Input], tenant: str | None) -> \
        bytes:
    """Compute the rows of a request, and return its answer as JSON."""
    rows = await model.llm.pool(inputs, priority=body.priority, tenant=tenant)
    info = model.llm.manifest.pooling
    assert info is not None
    tokens = sum(len(own.token_ids) for own in inputs)

    def written() -> bytes:
        return json.dumps({
            "id": f"{body.PREFIX}-{secrets.token_hex(12)}", "object": "list",
            "created": int(time.time()), "model": model.name, **body.results(info, rows),
            "usage": body.usage(tokens)}, ensure_ascii=False, separators=(",", ":")).encode()

    return await asyncio.to_thread(written)
