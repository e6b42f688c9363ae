"""Description of a checkpoint's processor, from its Hugging Face files.

| file | what is read |
| --- | --- |
| processor_config.json | processor_class, its settings, image_processor, feature_extractor |
| preprocessor_config.json | the same of one or both, in checkpoints before transformers 5 |
| tokenizer_config.json | special tokens such as image_token |
| config.json | token ids, and settings that LLaVA's older files lack |
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from tokenizers import Tokenizer

from llmc.errors import LlmcError, reason_of, shown
from llmc.runtime.multimodal.feature_extractors import FEATURE_EXTRACTORS
from llmc.runtime.multimodal.image_processors import IMAGE_PROCESSORS
from llmc.runtime.multimodal.items import Modality
from llmc.runtime.multimodal.processor import AudioInputs, ImageInputs, ProcessorDescription
from llmc.runtime.multimodal.prompt_replacements import (
    AUDIO_REPLACEMENTS,
    IMAGE_REPLACEMENTS,
    PromptReplacement,
)

Settings = Mapping[str, Any]
Model = TypeVar("Model", bound=BaseModel)
_WITHOUT_PROMPT = ("WhisperProcessor",)  # of encoder-decoder models


def describe_processor(checkpoint: Path, tokenizer: Tokenizer,
                       media: Collection[Modality] = ("image", "audio")) -> ProcessorDescription:
    """Describe the preprocessing of a checkpoint.

    Args:
        checkpoint: directory of Hugging Face files.
        media: what to describe. Audio of a model of images is left out if its processor class has
            no rule for it.

    Raises:
        LlmcError: a class, a setting or a token is not supported; the message names it.
    """
    return _Reader(checkpoint, tokenizer).describe(media)


class _Reader:
    def __init__(self, checkpoint: Path, tokenizer: Tokenizer) -> None:
        self._checkpoint, self._tokenizer = checkpoint, tokenizer
        self._processor = _read_json(checkpoint / "processor_config.json")
        self._preprocessor = _read_json(checkpoint / "preprocessor_config.json")
        self._tokenizer_config = _read_json(checkpoint / "tokenizer_config.json")
        self._config = _read_json(checkpoint / "config.json")

    def describe(self, media: Collection[Modality]) -> ProcessorDescription:
        if not self._processor and not self._preprocessor:
            raise LlmcError(f"'{self._checkpoint}' has no processor_config.json and no "
                            f"preprocessor_config.json, which say how images and audio are "
                            f"preprocessed; copy them from the model's repository")
        name = self._processor_class()
        image = self._image_settings() if "image" in media else None
        audio = self._audio_settings() if "audio" in media else None
        if image is None and audio is None:
            raise LlmcError(f"the processor files in '{self._checkpoint}' name no image_processor "
                            f"and no feature_extractor; copy those of the model's repository")
        if name not in (*IMAGE_REPLACEMENTS, *AUDIO_REPLACEMENTS, *_WITHOUT_PROMPT):
            raise LlmcError(f"the processor class {name} is not supported; supported: "
                            f"{', '.join(self._served())}")
        if image is not None and name not in AUDIO_REPLACEMENTS:
            audio = None
        return ProcessorDescription(
            image=None if image is None else self._describe_images(name, image),
            audio=None if audio is None else self._describe_audio(name, audio))

    def _served(self) -> list[str]:
        return sorted({*IMAGE_REPLACEMENTS, *AUDIO_REPLACEMENTS, *_WITHOUT_PROMPT})

    def _processor_class(self) -> str:
        for settings in (self._processor, self._preprocessor, self._tokenizer_config):
            name = settings.get("processor_class")
            if isinstance(name, str):
                return name
        raise LlmcError(f"the processor files in '{self._checkpoint}' name no processor_class; "
                        f"add it to processor_config.json")

    def _image_settings(self) -> Settings | None:
        own = self._processor.get("image_processor")
        if isinstance(own, Mapping):
            return own
        preprocessor = self._preprocessor
        legacy = str(preprocessor.get("feature_extractor_type", ""))
        if "image_processor_type" in preprocessor:
            return preprocessor
        if legacy.replace("FeatureExtractor", "ImageProcessor") in IMAGE_PROCESSORS:
            return {**preprocessor, "image_processor_type":
                    legacy.replace("FeatureExtractor", "ImageProcessor")}
        return None

    def _audio_settings(self) -> Settings | None:
        own = self._processor.get("feature_extractor")
        if isinstance(own, Mapping):
            return own
        name = self._preprocessor.get("feature_extractor_type")
        is_image = "image_processor_type" not in self._preprocessor and isinstance(name, str) \
            and name.replace("FeatureExtractor", "ImageProcessor") in IMAGE_PROCESSORS
        return None if name is None or is_image else self._preprocessor

    def _describe_images(self, name: str, settings: Settings) -> ImageInputs:
        if name not in IMAGE_REPLACEMENTS:
            raise LlmcError(f"the processor class {name} is not supported with images; supported: "
                            f"{', '.join(sorted(IMAGE_REPLACEMENTS))}")
        prompt = self._prompt(IMAGE_REPLACEMENTS[name], name)
        given = str(settings.get("image_processor_type"))
        own = given.removesuffix("Fast").removesuffix("Pil")
        if own not in IMAGE_PROCESSORS:
            raise LlmcError(f"the image processor {given} is not supported; supported: "
                            f"{', '.join(sorted(IMAGE_PROCESSORS))}")
        processor = self._validate(IMAGE_PROCESSORS[own], {
            **settings, "image_processor_type": own, **prompt.settings_of_images()})
        placeholder, row_token = self._token_ids(prompt, "image")
        return self._validate(ImageInputs, {
            "processor": processor, "prompt": prompt, "placeholder_id": placeholder,
            "row_token_id": row_token})

    def _describe_audio(self, name: str, settings: Settings) -> AudioInputs:
        own = str(settings.get("feature_extractor_type"))
        if own not in FEATURE_EXTRACTORS:
            raise LlmcError(f"the feature extractor {own} is not supported; supported: "
                            f"{', '.join(sorted(FEATURE_EXTRACTORS))}")
        extractor = self._validate(FEATURE_EXTRACTORS[own],
                                   {**settings, "feature_extractor_type": own})
        if name in _WITHOUT_PROMPT:
            return self._validate(AudioInputs, {"extractor": extractor})
        if name not in AUDIO_REPLACEMENTS:
            raise LlmcError(f"the processor class {name} is not supported with audio; supported: "
                            f"{', '.join(sorted((*AUDIO_REPLACEMENTS, *_WITHOUT_PROMPT)))}")
        prompt = self._prompt(AUDIO_REPLACEMENTS[name], name)
        placeholder, row_token = self._token_ids(prompt, "audio")
        return self._validate(AudioInputs, {
            "extractor": extractor, "prompt": prompt, "placeholder_id": placeholder,
            "row_token_id": row_token})

    def _prompt(self, kind: type[PromptReplacement], name: str) -> PromptReplacement:
        extra = self._tokenizer_config.get("extra_special_tokens")
        tokens = {key: _token_text(value) for key, value in {
            **self._tokenizer_config, **(extra if isinstance(extra, Mapping) else {})}.items()
            if key.endswith("_token")}
        vision = self._config.get("vision_config")
        fallbacks = {
            "patch_size": vision.get("patch_size") if isinstance(vision, Mapping) else None,
            "vision_feature_select_strategy": self._config.get("vision_feature_select_strategy")}
        required = {key: value for key, value in fallbacks.items()
                    if key in kind.model_fields and kind.model_fields[key].is_required()}
        return self._validate(kind, {**required, **_present(self._processor), **_present(tokens),
                                     "processor_class": name})

    def _token_ids(self, prompt: PromptReplacement, modality: str) -> tuple[int, int | None]:
        """Ids of the placeholder and of the token of rows.

        Raises:
            LlmcError: the tokenizer lacks one, or config.json has another.
        """
        placeholder = self._token_id(prompt.placeholder)
        row_token = None if prompt.row_token is None else self._token_id(prompt.row_token)
        thinker = self._config.get("thinker_config")
        for config in (self._config, thinker if isinstance(thinker, Mapping) else {}):
            for key in (f"{modality}_token_id", f"{modality}_token_index"):
                expected = placeholder if row_token is None else row_token
                if isinstance(config.get(key), int) and config[key] != expected:
                    raise LlmcError(f"{key} of config.json is {config[key]}, the token "
                                    f"'{prompt.row_token or prompt.placeholder}' is {expected} in "
                                    f"the tokenizer; copy both files from one checkpoint")
        return placeholder, row_token

    def _token_id(self, token: str) -> int:
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None:
            raise LlmcError(f"the tokenizer of '{self._checkpoint}' has no token '{token}', which "
                            f"its processor puts into prompts; copy tokenizer_config.json and "
                            f"tokenizer.json from one checkpoint")
        return found

    def _validate(self, kind: type[Model], settings: Settings) -> Model:
        """Make a model of the settings that it has; others are of no effect in transformers."""
        try:
            return kind.model_validate({key: value for key, value in _present(settings).items()
                                        if key in kind.model_fields
                                        or key in getattr(kind, "legacy_settings", ())})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "settings"
            message = str(first["msg"]).removeprefix("Value error, ")
            raise LlmcError(f"{kind.__name__} of '{self._checkpoint}' has {place} = "
                            f"{shown(first['input'])}, which is not supported: {message}") \
                from error


def _present(settings: Settings) -> dict[str, Any]:
    """Settings that are not null: null is the class's default."""
    return {key: value for key, value in settings.items() if value is not None}


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """Read an object; empty if the file is absent.

    Raises:
        LlmcError: it is no JSON object.
    """
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise LlmcError(f"'{path}' cannot be read ({reason_of(error)}); copy it from the model's "
                        f"repository again") from error
    if not isinstance(value, dict):
        raise LlmcError(f"'{path}' is {shown(value)}, an object is expected; copy it from the "
                        f"model's repository again")
    return value
