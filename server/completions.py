"""/v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from llmc.runtime.request import Piece
from llmc.server.answer import Choices, Object, finite
from llmc.server.errors import ApiError
from llmc.server.model import Job, Model, check_choices
from llmc.server.protocol import CompletionRequest

_MAX_TOKENS = 16  # where a client does not say, as OpenAI has it


async def read_completion(model: Model, body: CompletionRequest) -> Job:
    """What is to be generated.

    Raises:
        LlmcError: the prompts are not sound.
    """
    if not body.prompts:
        raise ApiError("there is no prompt; give at least one", param="prompt")
    check_choices(len(body.prompts), body.n or 1)
    prompts = await model.read_prompts(body.prompts, body.add_special_tokens)
    max_tokens = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return Job(prompts, body.sampling(max_tokens, body.logprobs, model.sampling_defaults),
               body.priority)


class CompletionAnswer(Choices):
    PREFIX, WHOLE, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: Model, body: CompletionRequest, job: Job) -> None:
        super().__init__(model, body, job)
        self._lengths: defaultdict[int, int] = defaultdict(int)  # of each choice's text so far

    def choice(self, index: int, pieces: list[Piece]) -> Object:
        return self._choice(index, pieces)

    def deltas(self, index: int, piece: Piece) -> Iterator[Object]:
        if piece.text or piece.finish_reason or piece.logprobs:
            yield self._choice(index, [piece])

    def _choice(self, index: int, pieces: Sequence[Piece]) -> Object:
        logprobs = self._logprobs(index, pieces) if pieces[-1].logprobs else None
        return {"index": index, "text": "".join(piece.text for piece in pieces),
                "logprobs": logprobs, "finish_reason": pieces[-1].finish_reason,
                "stop_reason": self.job.stop_reason(pieces[-1])}

    def _logprobs(self, index: int, pieces: Sequence[Piece]) -> Object:
        made: Object = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in pieces:
            assert piece.logprobs is not None
            chosen = finite(piece.logprobs.chosen)
            names = token_names([*(token for token, _ in piece.logprobs.top), piece.token_id],
                                self.model.token_bytes)
            name = names[piece.token_id]
            top = {names[token]: finite(value) for token, value in piece.logprobs.top}
            made["tokens"].append(name)
            made["token_logprobs"].append(chosen)
            made["top_logprobs"].append({**top, name: chosen} if top else None)
            made["text_offset"].append(self._lengths[index])
            self._lengths[index] += len(piece.text)
        return made


def token_names(tokens: Sequence[int], read_bytes: Callable[[int], bytes]) -> dict[int, str]:
    """A distinct name for each token id: its text, or `bytes:…` where its bytes are no whole
    characters, as OpenAI writes it; or its id where an earlier token has that name.
    """
    names: dict[str, int] = {}
    for token in dict.fromkeys(tokens):
        name = _name(read_bytes(token))
        names[name if name and name not in names else f"token_id:{token}"] = token
    return {token: name for name, token in names.items()}


def _name(made: bytes) -> str:
    try:
        return made.decode()
    except UnicodeDecodeError:
        return f"bytes:{made.decode(errors='backslashreplace')}"
