"""Images and audio in the contents of messages.

| part | from |
| --- | --- |
| `{"type": "image_url", "image_url": {"url": …}}` | OpenAI |
| `{"type": "input_image", "image_url": "…"}` | OpenAI, of responses |
| `{"type": "input_audio", "input_audio": {"data": base64, "format": …}}` | OpenAI |
| `{"type": "audio_url", "audio_url": {"url": …}}` | vLLM |
| `{"type": "image", "image": …}`, `"url"` or `"path"` in place of `"image"` | transformers |
| `{"type": "audio", "audio": …}`, `"url"` or `"path"` in place of `"audio"` | transformers |
| `{"type": "image"}`, `{"type": "audio"}` | transformers, media given beside the messages |

`split_media` takes the media out, so that a chat template reads `{"type": "image"}` in their place.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import LlmcError, reason_of_file, shortened, shown
from llmc.runtime.multimodal.items import Modality
from llmc.runtime.multimodal.media import SCHEMES, MediaAccess, fetch, is_data

# Modalities by type of part: those of HTTP interfaces; with those of Python programs.
WIRE_PARTS: dict[str, Modality] = {"image_url": "image", "input_image": "image",
                                   "audio_url": "audio", "input_audio": "audio"}
_MODALITIES: dict[str, Modality] = {"image": "image", "audio": "audio", **WIRE_PARTS}
_VIDEOS = ("video", "video_url", "input_video")  # refused by name


@dataclass(frozen=True)
class MediaSource:
    """An item of a message.

    Args:
        value: a URL, a path, bytes, or an object such as a PIL image; None if the message says that
            an item is there, and not which.
    """

    modality: Modality
    value: Any


def has_media(messages: object) -> bool:
    """Whether a part of messages is an image or audio; False for what are no messages."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)] \
        if isinstance(messages, Sequence) else []
    return any(isinstance(part, Mapping) and part.get("type") in (*_MODALITIES, *_VIDEOS)
               for content in contents if isinstance(content, list) for part in content)


def user_message(text: str, images: Sequence[Any] = (), audio: Sequence[Any] = ()) -> \
        dict[str, Any]:
    """Return a message of the user, with pictures and audio clips before its text.

    Args:
        images, audio: values of `MediaSource`.
    """
    if not images and not audio:
        return {"role": "user", "content": text}
    return {"role": "user", "content": [*({"type": "image", "image": own} for own in images),
                                        *({"type": "audio", "audio": own} for own in audio),
                                        {"type": "text", "text": text}]}


def load_source(source: MediaSource) -> Any:
    """Return what a processor reads: bytes, or an object such as a PIL image.

    Raises:
        LlmcError: the source is absent, or cannot be read.
    """
    value = source.value
    if value is None:
        raise LlmcError(f"a part of type '{source.modality}' has no {source.modality}; give a "
                        f"path, bytes or a data: URL")
    if not isinstance(value, str | Path):
        return value
    scheme, colon, _ = str(value).partition(":")
    if colon and scheme.lower() in SCHEMES:
        if not is_data(str(value)):
            raise LlmcError(f"'{shortened(str(value), 80)}' is not read, as only data: URLs are; "
                            f"give the path of a file")
        return fetch(str(value), MediaAccess())
    try:
        return Path(value).read_bytes()
    except (OSError, ValueError) as error:
        raise LlmcError(f"'{value}' cannot be read ({reason_of_file(error)}); give the path of a "
                        f"file") from error


def split_media(messages: Sequence[Mapping[str, Any]]) -> \
        tuple[list[dict[str, Any]], list[MediaSource]]:
    """Replace media in messages by parts that chat templates read.

    Returns:
        The messages, and the media in order.

    Raises:
        LlmcError: a part has an unknown type, or lacks its value.
    """
    split, sources = list[dict[str, Any]](), list[MediaSource]()
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            content = [_split_part(f"part {place} of message {index}", part, sources)
                       for place, part in enumerate(content)]
        split.append({**message, **({"content": content} if "content" in message else {})})
    return split, sources


def _split_part(name: str, part: object, sources: list[MediaSource]) -> object:
    """Return what a template reads; append the item to `sources`."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise LlmcError(f'{name} is {shown(part)}; give one like {{"type": "text", "text": "…"}}')
    if kind not in _MODALITIES:
        if kind in _VIDEOS:
            raise LlmcError(f"{name} is a video, which llmc does not support; give some of its "
                            f"frames as images")
        if kind != "text":
            raise LlmcError(f"{name} has the type {shown(kind)}; supported: text, "
                            f"{', '.join(_MODALITIES)}")
        return part
    modality = _MODALITIES[kind]
    value = _input_audio(name, part) if kind == "input_audio" else \
        _url(name, kind, part) if kind in WIRE_PARTS else \
        next((part[key] for key in (kind, "url", "path") if part.get(key) is not None), None)
    sources.append(MediaSource(modality, value))
    return {"type": modality}


def _url(name: str, kind: str, part: Mapping[str, Any]) -> str:
    value = part.get("image_url" if kind == "input_image" else kind)
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise LlmcError(f'the {kind} of {name} is {shown(value)}; give {{"url": "…"}}')
    return url


def _input_audio(name: str, part: Mapping[str, Any]) -> bytes:
    value = part.get("input_audio")
    data = value.get("data") if isinstance(value, Mapping) else None
    try:
        if isinstance(data, str):
            return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise LlmcError(f"the input_audio of {name} has invalid base64 ({error}); encode the file "
                        f"again") from error
    raise LlmcError(f"the input_audio of {name} is {shown(value)}; give "
                    f'{{"data": "…", "format": "wav"}} with a file in base64')
