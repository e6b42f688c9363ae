"""Log-probabilities of prompts, as OpenAI's `echo` and vLLM's `prompt_logprobs` have them.

Everything here is proportional to the prompt, so it is called in a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llmc.runtime.decoding.sampling import Logprobs
from llmc.runtime.decoding.stopping import TextStream
from llmc.server.errors import ApiError
from llmc.server.model import Model

MAX_VALUES = 2**18  # log-probabilities of a request's prompts, each of which is about 100 bytes
_LEAST = -9999.0  # for -inf, which JSON lacks; as vLLM has it
PromptLogprobs = Sequence[Logprobs | None]


def check_values(prompts: Sequence[Sequence[int]], count: int | None) -> None:
    """Raises ApiError where a request asks for more than `MAX_VALUES`."""
    values = 0 if count is None else sum(map(len, prompts)) * (count + 1)
    if values > MAX_VALUES:
        raise ApiError(f"{values} log-probabilities of prompts are more than {MAX_VALUES}; ask for "
                       f"fewer most likely tokens, or send several requests",
                       param="prompt_logprobs")


def by_token_id(model: Model, prompt: Sequence[int], made: PromptLogprobs) -> \
        list[dict[str, Any] | None]:
    """vLLM's form: for each token of a prompt null, or log-probability, rank and text by id."""
    found: list[dict[str, Any] | None] = []
    for token, own in zip(prompt, made, strict=True):
        if own is None:
            found.append(None)
            continue
        ranked = [(token, own.chosen, own.rank),
                  *((other, value, rank) for rank, (other, value) in enumerate(own.top, 1))]
        found.append({str(other): {"logprob": max(value, _LEAST), "rank": rank,
                                   "decoded_token": model.token_text(other)}
                      for other, value, rank in ranked})
    return found


def echoed(model: Model, prompt: Sequence[int], made: PromptLogprobs, text: str,
           show_special_tokens: bool) -> dict[str, list[Any]]:
    """The form of OpenAI's completions, of a prompt that is echoed as `text`."""
    logprobs: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [],
                                      "text_offset": []}
    for token, own, offset in zip(prompt, made, _offsets(model, prompt, show_special_tokens),
                                  strict=True):
        ranked = () if own is None else own.top
        names = _names(model, [*(other for other, _ in ranked), token])
        top: dict[str, float] | None = None
        if own is not None and ranked:
            top = {names[other]: max(value, _LEAST) for other, value in ranked}
            top[names[token]] = max(own.chosen, _LEAST)
        logprobs["tokens"].append(names[token])
        logprobs["token_logprobs"].append(None if own is None else max(own.chosen, _LEAST))
        logprobs["top_logprobs"].append(top)
        logprobs["text_offset"].append(min(offset, len(text)))
    return logprobs


def _names(model: Model, tokens: Sequence[int]) -> dict[int, str]:
    """Distinct names of tokens: their texts, or ids where an earlier one has that text."""
    names: dict[str, int] = {}
    for token in dict.fromkeys(tokens):
        text = model.token_text(token)
        names[text if text and text not in names else f"token_id:{token}"] = token
    return {token: name for name, token in names.items()}


def _offsets(model: Model, prompt: Sequence[int], show_special_tokens: bool) -> Iterator[int]:
    """Where each token begins in the prompt's text."""
    stream, offset = TextStream(model.llm.tokenizer, (), (), show_special_tokens), 0
    for token in prompt:
        yield offset
        offset += len(stream.push(token))
