"""Log-probabilities of prompts: OpenAI's `echo` and vLLM's `prompt_logprobs`.

The work is proportional to the prompt, so callers use a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llmc.runtime.sampling.detokenizer import IncrementalDetokenizer
from llmc.runtime.sampling.sampler import Logprobs
from llmc.server.answer import finite
from llmc.server.errors import ApiError
from llmc.server.model import Model
from llmc.server.token_names import token_names

MAX_VALUES = 2**18  # log-probabilities of a request's prompts, about 100 bytes each
PromptLogprobs = Sequence[Logprobs | None]


def check_values(prompts: Sequence[Sequence[int]], count: int | None) -> None:
    """Raise ApiError if a request has more than `MAX_VALUES` prompt log-probabilities."""
    values = 0 if count is None else sum(map(len, prompts)) * (count + 1)
    if values > MAX_VALUES:
        raise ApiError(f"the request has {values} log-probabilities of prompts, expected at most "
                       f"{MAX_VALUES}; ask for fewer most likely tokens, or send several requests",
                       param="prompt_logprobs")


def by_token_id(model: Model, prompt: Sequence[int], scores: PromptLogprobs) -> \
        list[dict[str, Any] | None]:
    """Return vLLM's format: per token None, or log-probability, rank and text by token id."""
    found: list[dict[str, Any] | None] = []
    for token, score in zip(prompt, scores, strict=True):
        if score is None:
            found.append(None)
            continue
        ranked = [(token, score.chosen, score.rank),
                  *((other, value, rank) for rank, (other, value) in enumerate(score.top, 1))]
        found.append({str(other): {"logprob": finite(value), "rank": rank,
                                   "decoded_token": model.token_text(other)}
                      for other, value, rank in ranked})
    return found


def echoed(model: Model, prompt: Sequence[int], scores: PromptLogprobs, text: str,
           show_special_tokens: bool) -> dict[str, list[Any]]:
    """Return the `logprobs` of OpenAI's completions for a prompt that is echoed as `text`."""
    logprobs: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [],
                                      "text_offset": []}
    for token, score, offset in zip(prompt, scores, _offsets(model, prompt, show_special_tokens),
                                  strict=True):
        ranked = () if score is None else score.top
        names = token_names([*(other for other, _ in ranked), token], model.token_bytes)
        top: dict[str, float] | None = None
        if score is not None and ranked:
            top = {names[other]: finite(value) for other, value in ranked}
            top[names[token]] = finite(score.chosen)
        logprobs["tokens"].append(names[token])
        logprobs["token_logprobs"].append(None if score is None else finite(score.chosen))
        logprobs["top_logprobs"].append(top)
        logprobs["text_offset"].append(min(offset, len(text)))
    return logprobs


def _offsets(model: Model, prompt: Sequence[int], show_special_tokens: bool) -> Iterator[int]:
    """Yield the offset of each token in the prompt's text."""
    stream, offset = IncrementalDetokenizer(model.llm.tokenizer, (), (), show_special_tokens), 0
    for token in prompt:
        yield offset
        offset += len(stream.push(token))
