"""The processor of a case directory: media to encoder inputs, placeholders to tokens.

`describe_processor` reads a checkpoint when it is compiled, and refuses what is not served.
`Processor` works from that description alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from llmc.artifacts.case_files import read_bounded
from llmc.errors import LlmcError, reason_of, shown
from llmc.runtime.multimodal.audio import (
    MAX_RATE,
    MAX_SECONDS,
    MIN_RATE,
    Waveform,
    load_audio,
    resample,
)
from llmc.runtime.multimodal.feature_extractors import (
    AnyFeatureExtractor,
    GemmaAudioFeatureExtractor,
    WhisperFeatureExtractor,
)
from llmc.runtime.multimodal.image_processors import AnyImageProcessor
from llmc.runtime.multimodal.image_processors.base import Arrays
from llmc.runtime.multimodal.images import load_image
from llmc.runtime.multimodal.items import PLURALS, MediaItem, Modality, PlaceholderRange
from llmc.runtime.multimodal.prompt_replacements import (
    AnyAudioReplacement,
    AnyImageReplacement,
    AudioTokenReplacement,
    PromptReplacement,
    Windows,
)

if TYPE_CHECKING:
    from PIL.Image import Image

# A file, mono samples at the model's rate, or mono samples and their rate in Hz.
Clip = bytes | Waveform | tuple[Waveform, int]
_MAX_BYTES = 1 << 20


class ImageInputs(BaseModel):
    """How images become rows and tokens.

    Args:
        placeholder_id: token id of the placeholder.
        row_token_id: token id of positions that take rows; None with cross-attention.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    processor: AnyImageProcessor
    prompt: AnyImageReplacement
    placeholder_id: int
    row_token_id: int | None = None


class AudioInputs(BaseModel):
    """How audio becomes rows and tokens.

    Args:
        prompt: None for encoder-decoder models.
        placeholder_id: token id of the placeholder; None without `prompt`.
        row_token_id: token id of positions that take rows; None without `prompt`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    extractor: AnyFeatureExtractor
    prompt: AnyAudioReplacement | None = None
    placeholder_id: int | None = None
    row_token_id: int | None = None

    def max_samples(self) -> int:
        """Samples of the longest clip that transformers does not truncate."""
        if self.prompt is None:
            return self.extractor.max_samples()
        rate = self.extractor.sampling_rate
        return int(self.prompt.max_seconds(self.extractor.max_samples() / rate) * rate)


class ProcessorDescription(BaseModel):
    """All that preprocessing needs; a file of the case directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: ImageInputs | None = None
    audio: AudioInputs | None = None


def read_processor(path: Path) -> Processor:
    """Read a processor from the JSON of its description.

    Raises:
        LlmcError: the file cannot be read, or is no such description.
    """
    try:
        return Processor(ProcessorDescription.model_validate_json(read_bounded(path, _MAX_BYTES)))
    except (OSError, ValidationError) as error:
        raise LlmcError(f"'{path}' cannot be read ({reason_of(error)}); compile the model again") \
            from error


class Processor:
    """Preprocessing of images and audio for one model."""

    def __init__(self, description: ProcessorDescription) -> None:
        self.description = description
        inputs: dict[Modality, ImageInputs | AudioInputs | None] = {
            "image": description.image, "audio": description.audio}
        self._prompts: dict[Modality, tuple[PromptReplacement, int, int | None]] = {
            modality: (own.prompt, own.placeholder_id, own.row_token_id)
            for modality, own in inputs.items()
            if own is not None and own.prompt is not None and own.placeholder_id is not None}

    @property
    def placeholders(self) -> dict[Modality, str]:
        """The token that stands for an item in a prompt, by modality."""
        return {modality: prompt.placeholder for modality, (prompt, _, _) in self._prompts.items()}

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer adds its special tokens to a prompt with items."""
        return all(prompt.adds_special_tokens for prompt, _, _ in self._prompts.values())

    @property
    def item_token_ids(self) -> frozenset[int]:
        """Token ids of placeholders and of positions that take rows."""
        return frozenset(own for _, placeholder, row in self._prompts.values()
                         for own in (placeholder, row) if own is not None)

    def require(self, modality: Modality) -> None:
        """Check that prompts may have items of this kind.

        Raises:
            LlmcError: the model takes none.
        """
        if modality not in self.placeholders:
            raise LlmcError(f"this model takes no {PLURALS[modality]}; leave them out")

    def process(self, media: Sequence[tuple[Modality, Any]]) -> list[MediaItem]:
        """Preprocess all media of a prompt: the images, then the audio clips.

        Args:
            media: see `process_images` and `process_audio`.

        Raises:
            LlmcError: the model does not take it, or an item is invalid.
        """
        images = [own for modality, own in media if modality == "image"]
        clips = [own for modality, own in media if modality == "audio"]
        return [*(self.process_images(images) if images else ()),
                *(self.process_audio(clips) if clips else ())]

    def process_images(self, images: Sequence[bytes | Image]) -> list[MediaItem]:
        """Preprocess all images of a prompt.

        Args:
            images: encoded images, or PIL images.

        Raises:
            LlmcError: the model takes no images, or one is invalid.
        """
        inputs = self.description.image
        if inputs is None:
            raise LlmcError("this model takes no images; give text only")
        items = []
        for index, image in enumerate(images):
            try:
                pixels = load_image(image)
                arrays = inputs.processor.process(pixels, len(images))
            except LlmcError as error:
                raise LlmcError(f"image {index}: {error}") from error
            item = _item("image", arrays, inputs.prompt, inputs.processor)
            fewer = pixels.nbytes <= sum(own.nbytes for own in item.arrays.values())
            items.append(replace(item, pixels=pixels) if fewer else item)
        return items

    def process_audio(self, clips: Sequence[Clip]) -> list[MediaItem]:
        """Preprocess all audio clips of a prompt.

        Args:
            clips: see `Clip`.

        Raises:
            LlmcError: the model takes no audio, or a clip is invalid.
        """
        inputs = self.description.audio
        if inputs is None:
            raise LlmcError("this model takes no audio; give text only")
        items = []
        for index, clip in enumerate(clips):
            try:
                arrays = self._features(inputs, clip)
            except LlmcError as error:
                raise LlmcError(f"audio clip {index}: {error}") from error
            items.append(_item("audio", arrays, inputs.prompt, inputs.extractor))
            if inputs.prompt is not None and not items[-1].num_rows:
                raise LlmcError(f"audio clip {index} is too short for a token; give a longer one")
        return items

    def _features(self, inputs: AudioInputs, clip: Clip) -> Arrays:
        extractor, prompt = inputs.extractor, inputs.prompt
        waveform = _waveform(clip, extractor.sampling_rate,
                             inputs.max_samples() / extractor.sampling_rate)
        extractor.check_length(waveform, inputs.max_samples())
        if isinstance(extractor, GemmaAudioFeatureExtractor):
            features, mask = extractor.features(waveform)
            if isinstance(prompt, AudioTokenReplacement) and prompt.windows == "cut":
                features, mask = features[:mask.sum()], mask[:mask.sum()]
            return {"input_features": features[None], "input_features_mask": mask[None]}
        assert isinstance(extractor, WhisperFeatureExtractor)
        if prompt is None:
            return {"input_features": extractor.features(extractor.window(waveform))[None]}
        assert isinstance(prompt, AudioTokenReplacement)
        features = _FEATURES[prompt.windows](extractor, waveform)
        if prompt.mask is None:
            return {"input_features": features}
        windows, _, frames = features.shape
        num_frames = frames if prompt.windows in ("none", "cut") else \
            -(-len(waveform) // extractor.hop_length)
        mask = (np.arange(windows * frames) < num_frames).astype(np.int32)
        return {"input_features": features, prompt.mask: mask.reshape(windows, frames)}

    def expand_text(self, text: str, items: Sequence[MediaItem]) -> str:
        """Replace each placeholder of a text by its item's tokens.

        Args:
            items: in the order of their placeholders; images and audio may be mixed.

        Raises:
            LlmcError: the placeholders do not match the items.
        """
        placeholders = {prompt.placeholder: modality
                        for modality, (prompt, _, _) in self._prompts.items()}
        if not placeholders:
            self._check_counts({}, items)
            return text
        for modality in {own.modality: None for own in items}:
            if modality in self._prompts and self._prompts[modality][0].placeholder in text:
                text = self._prompts[modality][0].complete(text)
        pattern = "|".join(map(re.escape, sorted(placeholders, key=len, reverse=True)))
        found = [placeholders[own] for own in re.findall(pattern, text)]
        self._check_counts({own: found.count(own) for own in placeholders.values()}, items)
        queues = _queues(items)
        return re.sub(pattern, lambda own: next(queues[placeholders[own[0]]]).replacement, text)

    def expand_ids(self, ids: Sequence[int], items: Sequence[MediaItem],
                   encode: Callable[[str], Sequence[int]]) -> list[int]:
        """Replace each placeholder of a tokenized prompt by its item's tokens.

        A text is better expanded before it is tokenized: its tokens may span the end of an item's.

        Args:
            encode: tokenizes a text without adding special tokens.

        Raises:
            LlmcError: the placeholders do not match the items.
        """
        placeholders = {placeholder: modality
                        for modality, (_, placeholder, _) in self._prompts.items()}
        self._check_counts({modality: sum(own == placeholder for own in ids)
                            for placeholder, modality in placeholders.items()}, items)
        queues, expanded = _queues(items), list[int]()
        for token in ids:
            if token in placeholders:
                expanded += encode(next(queues[placeholders[token]]).replacement)
            else:
                expanded.append(token)
        return expanded

    def locate(self, ids: Sequence[int], items: Sequence[MediaItem]) -> list[PlaceholderRange]:
        """Find the positions of each item in an expanded prompt.

        Raises:
            LlmcError: the prompt has more or fewer positions of rows than the items have rows.
        """
        tokens = np.asarray(ids, np.int64)
        positions: dict[Modality, list[int]] = {}
        for modality, (_, placeholder, row_token) in self._prompts.items():
            token = placeholder if row_token is None else row_token
            found = np.flatnonzero(tokens == token)
            own = [item for item in items if item.modality == modality]
            expected = sum(max(item.num_rows, 1) if row_token is None else item.num_rows
                           for item in own)
            if len(found) != expected:
                raise LlmcError(f"the prompt has {len(found)} tokens {token} for "
                                f"{PLURALS[modality]}, the {len(own)} items have {expected}; "
                                f"give one placeholder per item, and none in other text")
            positions[modality] = found.tolist()
        return [self._range(item, positions) for item in items]

    def _range(self, item: MediaItem, positions: dict[Modality, list[int]]) -> PlaceholderRange:
        """Take an item's positions off the list."""
        own = positions[item.modality][:max(item.num_rows, 1)]
        del positions[item.modality][:len(own)]
        return PlaceholderRange(item, own[0], own[-1] - own[0] + 1,
                                np.array(own[:item.num_rows], np.int64))

    def _check_counts(self, found: dict[Modality, int], items: Sequence[MediaItem]) -> None:
        for modality in PLURALS:
            given = sum(item.modality == modality for item in items)
            if found.get(modality, 0) != given:
                name = self.placeholders.get(modality)
                placeholders = "no placeholders" if name is None else \
                    f"{found[modality]} placeholders '{name}'"
                raise LlmcError(f"the prompt has {placeholders} for {given} "
                                f"{PLURALS[modality]}; give one placeholder per item")


def _waveform(clip: Clip, rate: int, max_seconds: float) -> Waveform:
    """Return a clip as mono samples at a rate; decoding of a file ends after `max_seconds`.

    Raises:
        LlmcError: it is of another type, cannot be read, or has samples that are no numbers.
    """
    if isinstance(clip, bytes):
        return load_audio(clip, rate, min(max_seconds, MAX_SECONDS))
    samples, own = clip if isinstance(clip, tuple) and len(clip) == 2 else (clip, rate)
    if not isinstance(samples, np.ndarray) or samples.ndim != 1 or \
            not np.issubdtype(samples.dtype, np.floating):
        raise LlmcError(f"it is {shown(clip)}; give a file, an array of mono samples within ±1, "
                        f"or a pair of samples and their rate in Hz")
    if not isinstance(own, Integral) or not MIN_RATE <= own <= MAX_RATE:
        raise LlmcError(f"its rate is {shown(own)}; give samples per second from {MIN_RATE} to "
                        f"{MAX_RATE}")
    if not np.isfinite(samples).all():
        raise LlmcError("it has samples that are no finite numbers; give others")
    return resample(samples.astype(np.float32, copy=False), int(own), rate)


def _one_window(extractor: WhisperFeatureExtractor, waveform: Waveform) -> NDArray[np.float32]:
    return extractor.features(extractor.window(waveform))[None]


def _cut_window(extractor: WhisperFeatureExtractor, waveform: Waveform) -> NDArray[np.float32]:
    """The features of a padded window up to the last frame that begins in the clip."""
    count = -(-len(waveform) // extractor.hop_length)
    later = extractor.n_fft // extractor.hop_length + 1  # frames that read samples of the clip, too
    size = min((count + later) * extractor.hop_length, extractor.max_samples())
    padded = np.full(size, extractor.padding_value, np.float32)
    padded[:len(waveform)] = waveform
    return extractor.features(padded)[None, :, :count]


def _no_window(extractor: WhisperFeatureExtractor, waveform: Waveform) -> NDArray[np.float32]:
    return extractor.features(waveform)[None]


def _several_windows(extractor: WhisperFeatureExtractor,
                     waveform: Waveform) -> NDArray[np.float32]:
    size = extractor.max_samples()
    return np.stack([extractor.features(extractor.window(waveform[start:start + size]))
                     for start in range(0, len(waveform), size)])


def _joined_windows(extractor: WhisperFeatureExtractor,
                    waveform: Waveform) -> NDArray[np.float32]:
    padding = -len(waveform) % extractor.max_samples()
    features = extractor.features(np.pad(waveform, (0, padding),
                                         constant_values=extractor.padding_value))
    frames = extractor.max_samples() // extractor.hop_length
    return features.reshape(len(features), -1, frames).swapaxes(0, 1)


# Features of a waveform, [windows, feature_size, frames].
_FEATURES: dict[Windows, Callable[[WhisperFeatureExtractor, Waveform], NDArray[np.float32]]] = {
    "one": _one_window, "cut": _cut_window, "none": _no_window, "several": _several_windows,
    "joined": _joined_windows}


def _item(modality: Modality, arrays: Arrays, prompt: PromptReplacement | None,
          processor: object) -> MediaItem:
    if prompt is None:
        return MediaItem(modality, arrays, "", 0)
    text, row_token = prompt.text(arrays, processor), prompt.row_token
    read = {name: own for name, own in arrays.items() if name not in prompt.unused_inputs()}
    return MediaItem(modality, read, text, 0 if row_token is None else text.count(row_token))


def _queues(items: Sequence[MediaItem]) -> dict[Modality, Iterator[MediaItem]]:
    return {modality: iter([item for item in items if item.modality == modality])
            for modality in PLURALS}
