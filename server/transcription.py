"""/v1/audio/transcriptions and /v1/audio/translations, with OpenAI's fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from llmc.errors import LlmcError, shortened
from llmc.runtime.core.transcription import Transcription
from llmc.runtime.sampling.params import SamplingParams
from llmc.server.errors import ApiError
from llmc.server.model import Model
from llmc.server.protocol import Body, Refused

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
MEDIA_TYPES: dict[str, str] = {
    "json": "application/json", "verbose_json": "application/json", "text": "text/plain",
    "srt": "text/plain", "vtt": "text/plain"}
_TIMED = ("srt", "verbose_json", "vtt")
_LISTS = ("timestamp_granularities", "include")
_MAX_FIELDS = 64
_NAME = re.compile(rb'(?:^|;)\s*name="([^"]*)"', re.IGNORECASE)
_DISPOSITION = re.compile(rb"content-disposition:\s*form-data(.*)", re.IGNORECASE)
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)


class SpeechRequest(Body):
    """The fields of a request besides `file`."""

    TASK: ClassVar[str]
    REFUSED: ClassVar[Refused] = {
        "stream": ((None, "false", "False", "0"), "the text is sent as a whole"),
        "include": ((None, []), "the model's log-probabilities are not returned"),
    }

    prompt: str = ""
    response_format: ResponseFormat = "json"
    temperature: float = Field(0.0, ge=0, le=2)

    @property
    def spoken(self) -> str | None:
        """Code of the given language."""
        return None


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
        Transcription:
    """Transcribe a request's audio.

    Raises:
        LlmcError: the model, the audio or a field is invalid.
    """
    llm = model.llm
    params = None if not body.temperature else SamplingParams(
        temperature=body.temperature, max_tokens=llm.max_model_len)
    llm.transcriber.require()
    try:
        return await llm.transcribe(
            file, language=body.spoken, task=body.TASK, prompt=body.prompt, params=params,
            timestamps=body.response_format in _TIMED, tenant=tenant)
    except LlmcError as error:
        text = str(error)
        if text.startswith("language "):
            raise ApiError(text, param="language") from None
        raise


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
                      "tokens": [*own.token_ids], "temperature": body.temperature}
                     for index, own in enumerate(result.segments)]})


def _clock(seconds: float, point: str) -> str:
    """Write a time as hours, minutes, seconds and milliseconds."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
