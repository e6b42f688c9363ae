"""/v1/completions."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence

from llmc.runtime.core.request import CompletionChunk
from llmc.server.answer import Choices, Object, finite
from llmc.server.errors import ApiError
from llmc.server.model import GenerationJob, Model, check_choices
from llmc.server.prompt_logprobs import by_token_id, check_values, echoed
from llmc.server.protocol import CompletionRequest
from llmc.server.token_names import token_names

_MAX_TOKENS = 16  # OpenAI's default


async def read_completion(model: Model, body: CompletionRequest) -> GenerationJob:
    """Build the generation job of a request.

    Raises:
        LlmcError: the prompts are invalid.
    """
    if not body.prompts and not body.embeds:
        raise ApiError("the list of prompts is empty; give at least one prompt", param="prompt")
    if body.embeds and (body.echo or body.scored is not None):
        raise ApiError("echo or prompt_logprobs is given with prompt_embeds, whose rows are no "
                       "tokens; leave it out", param="prompt_embeds")
    check_choices(len(body.prompts) + len(body.embeds), body.n or 1)
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs is not supported with stream; leave out stream, or give "
                       "echo and logprobs instead", param="prompt_logprobs")
    embeds = await model.read_embeds(body.embeds)
    prompts = await model.read_prompts(body.prompts, body.add_special_tokens)
    check_values(prompts, body.scored)
    max_tokens = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = await model.predicted(
        body.sampling(max_tokens, body.logprobs, model.sampling_defaults, body.scored),
        body.prediction)
    echo = await asyncio.to_thread(_texts, model, body, prompts) if body.echo else None
    return GenerationJob([*(own.token_ids for own in embeds), *prompts], params, body.priority,
                         echo, with_rows=embeds)


def _texts(model: Model, body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Return the prompts as texts for echo; texts are unchanged.

    Raises:
        LlmcError: see `LLM.detokenize`.
    """
    return [prompt if isinstance(prompt, str) else
            model.llm.detokenize(ids, skip_special_tokens=body.skip_special_tokens)
            for prompt, ids in zip(body.prompts, prompts, strict=True)]


class CompletionAnswer(Choices):
    PREFIX, WHOLE, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: Model, body: CompletionRequest, job: GenerationJob) -> None:
        super().__init__(model, body, job)
        self._body = body
        self._echoed: set[int] = set()  # choices whose prompt has been sent
        self._lengths: defaultdict[int, int] = defaultdict(int)  # characters of each choice so far

    def choice(self, index: int, pieces: list[CompletionChunk]) -> Object:
        return self._choice(index, pieces)

    def deltas(self, index: int, piece: CompletionChunk) -> Iterator[Object]:
        is_first = self.job.echo is not None and index not in self._echoed
        if piece.text or piece.finish_reason or piece.logprobs or is_first:
            yield self._choice(index, [piece])

    def _choice(self, index: int, pieces: Sequence[CompletionChunk]) -> Object:
        first, last = pieces[0], pieces[-1]
        text, echo = "".join(piece.text for piece in pieces), None
        if self.job.echo is not None and index not in self._echoed:
            self._echoed.add(index)
            text, echo = self.job.echo[first.index] + text, self._echo(index, first)
        logprobs = self._logprobs(index, pieces) if last.logprobs else None
        if echo is not None:
            logprobs = echo if logprobs is None else {
                name: echo[name] + values for name, values in logprobs.items()}
        choice = {"index": index, "text": text, "logprobs": logprobs,
                  "finish_reason": last.finish_reason, "stop_reason": self.job.stop_reason(last)}
        if self._body.prompt_logprobs is not None and first.prompt_logprobs is not None:
            choice["prompt_logprobs"] = by_token_id(
                self.model, self.job.prompts[first.index], first.prompt_logprobs)
        return choice

    def _echo(self, index: int, first: CompletionChunk) -> Object | None:
        """Return the prompt's log-probabilities if those of the choice are requested."""
        assert self.job.echo is not None
        text = self.job.echo[first.index]
        self._lengths[index] = len(text)
        if self._body.logprobs is None or first.prompt_logprobs is None:
            return None
        return echoed(self.model, self.job.prompts[first.index], first.prompt_logprobs, text,
                      self.job.params.show_special_tokens)

    def _logprobs(self, index: int, pieces: Sequence[CompletionChunk]) -> Object:
        logprobs: Object = {"tokens": [], "token_logprobs": [], "top_logprobs": [],
                            "text_offset": []}
        for piece in pieces:
            assert piece.logprobs is not None and piece.token_id is not None
            logprob = finite(piece.logprobs.chosen)
            names = token_names([*(token for token, _ in piece.logprobs.top), piece.token_id],
                                self.model.token_bytes)
            name = names[piece.token_id]
            top = {names[token]: finite(value) for token, value in piece.logprobs.top}
            logprobs["tokens"].append(name)
            logprobs["token_logprobs"].append(logprob)
            logprobs["top_logprobs"].append({**top, name: logprob} if top else None)
            logprobs["text_offset"].append(self._lengths[index])
            self._lengths[index] += len(piece.text)
        return logprobs
