"""/v1/audio/transcriptions and /v1/audio/translations, with OpenAI's fields."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmc.errors import LlmcError, shortened
from llmc.runtime.core.transcription import Transcription, TranscriptionChunk
from llmc.runtime.sampling.speech_fallback import SpeechOptions
from llmc.server.answer import DONE, event
from llmc.server.errors import ApiError
from llmc.server.model import Model
from llmc.server.protocol import Body, Refused

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
MEDIA_TYPES: dict[str, str] = {
    "json": "application/json", "verbose_json": "application/json", "text": "text/plain",
    "srt": "text/plain", "vtt": "text/plain"}
_TIMED = ("srt", "verbose_json", "vtt")
_LISTS = ("timestamp_granularities", "include", "fallback_temperatures")
_STREAMED = ("json", "text")
_MAX_FIELDS = 64
_NAME = re.compile(rb'(?:^|;)\s*name="([^"]*)"', re.IGNORECASE)
_DISPOSITION = re.compile(rb"content-disposition:\s*form-data(.*)", re.IGNORECASE)
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)


class SpeechRequest(Body):
    """The fields of a request besides `file`."""

    TASK: ClassVar[str]
    REFUSED: ClassVar[Refused] = {
        "include": ((None, []), "the model's log-probabilities are not returned"),
    }

    prompt: str = ""
    response_format: ResponseFormat = "json"
    temperature: float = Field(0.0, ge=0, le=2)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool = False
    fallback_temperatures: list[Annotated[float, Field(gt=0, le=2)]] = Field(
        [], description="Temperatures at which a window is decoded again, in order.", max_length=16)
    compression_ratio_threshold: float | None = Field(
        None, description="Ratio of compression above which a window is decoded again.")
    logprob_threshold: float | None = Field(
        None, description="Mean log-probability below which a window is decoded again.")
    no_speech_threshold: float | None = Field(
        None, description="Probability of no speech above which an unlikely window is skipped.")
    condition_on_prev_tokens: bool = Field(
        False, description="Decode each window after the text of earlier ones.")

    @property
    def spoken(self) -> str | None:
        """Code of the given language."""
        return None

    def options(self) -> SpeechOptions:
        """When windows are decoded again or skipped.

        Raises:
            LlmcError: a field needs another.
        """
        return SpeechOptions(self.fallback_temperatures, self.compression_ratio_threshold,
                             self.logprob_threshold, self.no_speech_threshold,
                             self.condition_on_prev_tokens)


class TranscriptionRequest(SpeechRequest):
    """The fields of /v1/audio/transcriptions."""

    TASK = "transcribe"

    language: str | None = None
    timestamp_granularities: list[Literal["segment"]] = Field(
        [], description="`word` is not supported.")

    @property
    def spoken(self) -> str | None:
        return self.language or None


class TranslationRequest(SpeechRequest):
    """The fields of /v1/audio/translations."""

    TASK = "translate"


def read_form(raw: bytes, content_type: str) -> tuple[bytes, bytes]:
    """Read a multipart body.

    Returns:
        The fields as JSON, and the contents of `file`.

    Raises:
        ApiError: the body is no multipart form, or has no file.
    """
    fields: dict[str, str | list[str]] = {}
    file: bytes | None = None
    for count, (name, value) in enumerate(_parts(raw, content_type)):
        if count >= _MAX_FIELDS:
            raise ApiError(f"the form has more than {_MAX_FIELDS} fields; send fewer")
        if name == "file":
            file = value
            continue
        try:
            text = value.decode()
        except UnicodeDecodeError:
            raise ApiError(f"{shortened(name)} is not UTF-8; encode it so", param=name) from None
        key = name.removesuffix("[]")
        if key in _LISTS:
            own = fields.setdefault(key, [])
            assert isinstance(own, list)
            own.append(text)
        else:
            fields[key] = text
    if not file:
        raise ApiError("the form has no file, or an empty one; send the audio as the field 'file'",
                       param="file")
    return json.dumps(fields).encode(), file


def _parts(raw: bytes, content_type: str) -> Iterator[tuple[str, bytes]]:
    """Name and contents of each field of a multipart form."""
    found = _BOUNDARY.search(content_type)
    boundary = b"--" + (found[1] or found[2]).encode("latin-1", "replace") if found else b""
    pieces = (b"\r\n" + raw).split(b"\r\n" + boundary) if found else []
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise ApiError("the body is no complete multipart form; send it as multipart/form-data "
                       "with a boundary")
    for piece in pieces[1:-1]:
        head, separator, value = piece.partition(b"\r\n\r\n")
        line = next((own for line in head.split(b"\r\n")
                     if (own := _DISPOSITION.match(line.strip()))), None)
        name = _NAME.search(line[1]) if line else None
        if not separator or name is None:
            raise ApiError("a field of the form has no name; send a Content-Disposition header "
                           "with one")
        yield name[1].decode("utf-8", "replace"), value


async def transcribe(model: Model, body: SpeechRequest, file: bytes, tenant: str | None) -> \
        AsyncGenerator[TranscriptionChunk, None]:
    """Transcribe a request's audio; yields its parts.

    Raises:
        LlmcError: the model, the audio or a field is invalid.
    """
    llm = model.llm
    if body.stream and body.response_format not in _STREAMED:
        raise ApiError(f"stream does not go with response_format {body.response_format}, as its "
                       f"events are text; leave one out", param="stream")
    default = llm.default_sampling_params
    params = replace(default, temperature=body.temperature, max_tokens=llm.max_model_len,
                     seed=body.seed, beam_width=1 if body.temperature else default.beam_width)
    llm.transcriber.require()
    try:
        async with aclosing(llm.stream_transcription(
                file, language=body.spoken, task=body.TASK, prompt=body.prompt, params=params,
                timestamps=body.response_format in _TIMED, options=body.options(),
                tenant=tenant)) as chunks:
            async for chunk in chunks:
                yield chunk
    except LlmcError as error:
        text = str(error)
        if text.startswith("language "):
            raise ApiError(text, param="language") from None
        raise


async def whole(chunks: AsyncGenerator[TranscriptionChunk, None]) -> Transcription:
    """Return the result of a transcription."""
    async with aclosing(chunks):
        async for chunk in chunks:
            last = chunk
    assert last.result is not None
    return last.result


async def events(chunks: AsyncGenerator[TranscriptionChunk, None],
                 finished: Callable[[Transcription], object]) -> AsyncGenerator[bytes, None]:
    """Yield OpenAI's events of a transcription.

    Args:
        chunks: parts of the transcription.
        finished: called with the result.
    """
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.text:
                yield event({"type": "transcript.text.delta", "delta": chunk.text})
            if chunk.result is not None:
                finished(chunk.result)
                yield event({"type": "transcript.text.done", "text": chunk.result.text,
                             "usage": _token_usage(chunk.result)}) + DONE


def _token_usage(result: Transcription) -> dict[str, Any]:
    read = result.audio_tokens + result.prompt_tokens
    return {"type": "tokens", "input_tokens": read, "output_tokens": result.completion_tokens,
            "total_tokens": read + result.completion_tokens,
            "input_token_details": {"audio_tokens": result.audio_tokens,
                                    "text_tokens": result.prompt_tokens}}


def answer(body: SpeechRequest, result: Transcription) -> str:
    """Write the answer in the requested format."""
    if body.response_format == "text":
        return f"{result.text}\n"
    if body.response_format == "srt":
        return "\n".join(f"{index}\n{_clock(own.start, ',')} --> {_clock(own.end, ',')}\n"
                         f"{own.text.strip()}\n"
                         for index, own in enumerate(result.segments, 1))
    if body.response_format == "vtt":
        return "WEBVTT\n\n" + "\n".join(
            f"{_clock(own.start, '.')} --> {_clock(own.end, '.')}\n{own.text.strip()}\n"
            for own in result.segments)
    usage = {"type": "duration", "seconds": result.duration}
    if body.response_format == "json":
        return json.dumps({"text": result.text, "usage": usage})
    return json.dumps({
        "task": body.TASK, "language": result.language, "duration": result.duration,
        "text": result.text, "usage": usage,
        "segments": [{"id": index, "start": own.start, "end": own.end, "text": own.text,
                      "tokens": [*own.token_ids], "temperature": own.temperature,
                      "avg_logprob": own.avg_logprob, "compression_ratio": own.compression_ratio,
                      "no_speech_prob": own.no_speech_prob}
                     for index, own in enumerate(result.segments)]})


def _clock(seconds: float, point: str) -> str:
    """Write a time as hours, minutes, seconds and milliseconds."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
