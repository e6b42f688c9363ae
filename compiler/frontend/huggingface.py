"""Hugging Face directories and hub ids with safetensors weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmc.artifacts.manifest import FeatureRows
from llmc.compiler.frontend.checkpoint import open_checkpoint, read_json
from llmc.compiler.frontend.origin import PATTERNS, directory_origin
from llmc.compiler.frontend.paths import refuse_pointer
from llmc.compiler.frontend.pooling import model_directory, read_plan
from llmc.compiler.frontend.raw import Check, RawDraft, RawModel, config_digest, unchecked
from llmc.compiler.frontend.scoring import (
    BY_CHECKPOINT,
    Scoring,
    check_pair_template,
    logit_score,
)
from llmc.compiler.frontend.sizes import check_sizes
from llmc.compiler.frontend.thinker import of_thinker, plain_thinker_config, thinker_config
from llmc.compiler.frontend.tokenizer_config import (
    read_chat_templates,
    write_chat_templates,
    write_special_tokens,
)
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.compiler.quant.checkpoint import read_quantized
from llmc.compiler.scratch import scratch_folder
from llmc.errors import LlmcError, reason_of
from llmc.runtime.chat_template import DEFAULT
from llmc.runtime.multimodal.description import describe_processor
from llmc.runtime.multimodal.feature_extractors import WhisperFeatureExtractor
from llmc.runtime.multimodal.items import PLURALS, Modality
from llmc.runtime.multimodal.processor import ProcessorDescription
from llmc.runtime.tokenizer import read_tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
                    "tokenizer.model", "vocab.txt")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def load_huggingface(model: str | Path, *, trust_remote_code: bool = False,
                     allow_pickle: bool = False, revision: str | None = None,
                     check: Check = unchecked, mtp: bool = False, task: str = "",
                     pooling: str = "", scoring: Scoring = BY_CHECKPOINT,
                     takes_embeds: bool = False, takes_media: bool = False) -> RawModel:
    """Export the model in a directory, or download it by hub id first.

    Args: see `load`.

    Raises:
        LlmcError: the directory, its config or its weights are missing, broken or inconsistent,
            or the quantization method is unsupported.
    """
    root = find_directory(model, revision)
    directory = model_directory(root)
    score = None
    if scoring.tokens:
        with scratch_folder() as scratch:
            copy_tokenizer(directory, scratch)
            score = logit_score(scoring.tokens, scratch)
    whole = _plain_config(directory)
    plain = plain_thinker_config(whole)
    plan = read_plan(root, plain, task, pooling, allow_pickle, score)
    decoded = of_thinker(read_quantized(directory, whole, lambda: open_checkpoint(
        directory, allow_pickle)), whole)
    # imports transformers: seconds
    config = thinker_config(read_config(directory, trust_remote_code))
    generation = _generation(directory)
    if config.is_encoder_decoder and not generation:  # as transformers does
        from transformers import GenerationConfig
        generation = GenerationConfig.from_model_config(config).to_dict()
    media = _media_of(config, directory) if takes_media and plan is None else ()
    check(plain, generation, config.is_encoder_decoder, "",
          "generate" if plan is None else plan.task, media, _is_multimodal(config))
    template = scoring.read_template()
    if plan is not None and template is not None:
        plan = replace(plan, pair_template=True)
    templates = _templates(directory, template)
    with scratch_folder() as scratch:
        copy_tokenizer(directory, scratch)  # errors before the slow export
        if plan is not None and plan.pair_template:
            write_chat_templates(templates, scratch)
            check_pair_template(scratch)
        processor = _describe_media(directory, scratch, media) if media else \
            _describe_speech(config, directory, scratch)
    from llmc.compiler.frontend.export import export

    exported = export(config, decoded.tensors, str(directory), linear=decoded.linear,
                      trust_remote_code=trust_remote_code, mtp=mtp, pooling=plan,
                      takes_embeds=takes_embeds, media=processor if media else None)
    if media and exported.audio is None and processor is not None:
        processor = processor.model_copy(update={"audio": None})
    if exported.features is not None and processor is not None:
        _check_features(exported.features, processor, directory)
    if plan is not None and exported.max_tokens is not None:
        plan = replace(plan, max_tokens=min(plan.max_tokens or exported.max_tokens,
                                            exported.max_tokens))
    draft = None if not exported.mtp else RawDraft(
        exported.mtp, "mtp", config_digest(plain), num_speculative_tokens=len(exported.mtp),
        chain="layers" if len(exported.mtp) > 1 else "tokens")
    return RawModel(exported.graph, plain, "huggingface",
                    lambda target: save_tokenizer(directory, target, template), generation,
                    (*decoded.notes, *exported.notes), exported.encoder, exported.features,
                    processor, exported.image, exported.audio, draft, directory_origin(
                        directory, None if Path(model).is_dir() else str(model)), pooling=plan)


def _is_multimodal(config: Any) -> bool:
    """Whether transformers has a class with encoders of images or audio for a decoder's config."""
    from llmc.compiler.frontend.parts import multimodal_class
    return multimodal_class(config) is not None


def _media_of(config: Any, directory: Path) -> tuple[Modality, ...]:
    """Kinds of items that prompts of a checkpoint with a processor may have."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    from llmc.compiler.frontend.parts import multimodal_class
    images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    takers: dict[Modality, bool] = {
        "image": images,
        # A class for text alone is used if there is one.
        "audio": multimodal_class(config) is not None
        and (images or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING)
        and getattr(config, "audio_config", None) is not None}
    return tuple(kind for kind, takes in takers.items() if takes) \
        if any((directory / name).is_file() for name in _PROCESSOR_FILES) else ()


def _describe_media(directory: Path, tokenizer: Path,
                    media: Sequence[Modality]) -> ProcessorDescription:
    """Describe the preprocessing of items of prompts.

    Args:
        tokenizer: directory of tokenizer.json.
        media: kinds of items; audio is left out beside images if it is not supported.
    """
    names = " and ".join(PLURALS[own] for own in media)
    if not (tokenizer / "tokenizer.json").is_file():
        raise LlmcError(f"'{directory}' has no tokenizer, which prompts with {names} are written "
                        f"with; copy tokenizer.json from the model's repository, or "
                        f"{LANGUAGE_MODEL_ONLY}")
    try:
        description = describe_processor(directory, read_tokenizer(tokenizer), media)
    except LlmcError as error:
        raise LlmcError(f"{error}; or {LANGUAGE_MODEL_ONLY}") from error
    for kind, given, words in (("image", description.image, "image_processor"),
                               ("audio", description.audio, "feature_extractor")):
        if given is None and media == (kind,):
            raise LlmcError(f"the processor files in '{directory}' name no {words}; copy those of "
                            f"the model's repository, or {LANGUAGE_MODEL_ONLY}")
    return description


def _describe_speech(config: Any, directory: Path, tokenizer: Path) -> ProcessorDescription | None:
    """Describe the preprocessing of an encoder that reads speech; None for other models.

    Args:
        tokenizer: directory of tokenizer.json.
    """
    from llmc.compiler.frontend.parts import reads_speech
    if not config.is_encoder_decoder or not reads_speech(config):
        return None
    if not (tokenizer / "tokenizer.json").is_file():
        raise LlmcError(f"'{directory}' has no tokenizer, which transcriptions are written with; "
                        f"copy tokenizer.json from the model's repository")
    description = describe_processor(directory, read_tokenizer(tokenizer))
    if description.audio is None or not isinstance(description.audio.extractor,
                                                   WhisperFeatureExtractor):
        raise LlmcError(f"the processor files in '{directory}' name no feature extractor of "
                        f"windows, which '{config.model_type}' reads; supported: "
                        f"WhisperFeatureExtractor")
    return description


def _check_features(rows: FeatureRows, processor: ProcessorDescription, directory: Path) -> None:
    """Reject a feature extractor that does not fit the encoder."""
    extractor = processor.audio and processor.audio.extractor
    assert isinstance(extractor, WhisperFeatureExtractor)
    frames = extractor.max_samples() // extractor.hop_length
    if (extractor.feature_size, frames) != (rows.num_channels, rows.num_frames):
        raise LlmcError(f"the feature extractor of '{directory}' makes {frames} frames of "
                        f"{extractor.feature_size}, the encoder reads {rows.num_frames} of "
                        f"{rows.num_channels}; copy preprocessor_config.json from the model's "
                        f"repository")


def find_directory(model: str | Path, revision: str | None = None) -> Path:
    """Return the local directory of a model, downloaded if it is a hub id.

    Args:
        model: a directory or a hub id.
        revision: branch, tag or commit of a hub id.

    Raises:
        LlmcError: the model does not exist or cannot be downloaded.
    """
    directory = Path(model)
    if directory.is_dir():
        _refuse_odd_files(directory)
        if not (model_directory(directory) / "config.json").is_file():
            raise LlmcError(f"'{directory}' has no config.json, so it is not a Hugging Face model "
                            f"directory; give one")
        return directory
    name = str(model)
    if directory.exists():
        raise LlmcError(f"'{model}' is neither a directory nor a .gguf or .onnx file; give the "
                        f"directory that has the model's config.json and weights")
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise LlmcError(f"'{model}' does not exist; give a directory, a .gguf or .onnx file, or a "
                        f"hub id like 'org/name'")
    try:
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(PATTERNS)))
    except Exception as error:  # network and hub raise errors of many types
        raise LlmcError(f"'{name}' is not a local directory and could not be downloaded from the "
                        f"hub ({reason_of(error)}); download it and give its directory") from error


def _refuse_odd_files(directory: Path) -> None:
    """Reject FIFOs, devices and sockets (reads would block), and folders named like files."""
    for path in directory.iterdir():
        if path.exists() and not path.is_file() and (
                not path.is_dir() or path.name in ("config.json", "generation_config.json",
                                                   *_TOKENIZER_FILES)):
            raise LlmcError(f"'{path}' is not a regular file; remove it, or download the model "
                            f"again")


def read_config(directory: Path, trust_remote_code: bool = False) -> Any:
    """Read the transformers config of a directory.

    Raises:
        LlmcError: the config is not JSON, or its model_type is unknown.
    """
    plain = _plain_config(directory)
    if "model_type" not in plain:
        raise LlmcError(f"'{directory / 'config.json'}' has no model_type; download it again, or "
                        f"add the model's")
    if plain.get("auto_map") and not trust_remote_code:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        if plain["model_type"] not in CONFIG_MAPPING:
            raise LlmcError(f"'{directory}' contains code for '{plain['model_type']}'; review it, "
                            f"and compile with --trust_remote_code to run it")
    from transformers import AutoConfig
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises errors of many types
        raise LlmcError(f"'{directory / 'config.json'}': transformers does not support "
                        f"architecture '{plain['model_type']}' or rejects its config "
                        f"({reason_of(error)}); correct the config, or use another model") \
            from error


def _plain_config(directory: Path) -> dict[str, Any]:
    config = read_json(directory / "config.json")
    check_sizes(config, directory / "config.json")
    return config


def _generation(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def save_tokenizer(directory: Path, target: Path, template: str | None = None) -> None:
    """Write the files of a tokenizer that the runtime needs.

    Args:
        template: the template to write in place of the tokenizer's.
    """
    copy_tokenizer(directory, target)
    if (target / "tokenizer.json").is_file():
        write_chat_templates(_templates(directory, template), target)
        write_special_tokens(directory, target)


def _templates(directory: Path, template: str | None) -> dict[str, str]:
    """Return the chat templates of a directory, or the one that replaces them."""
    return read_chat_templates(directory) if template is None else {DEFAULT: template}


def copy_tokenizer(directory: Path, target: Path) -> None:
    """Copy tokenizer files, and convert a slow tokenizer to tokenizer.json."""
    for name in _TOKENIZER_FILES:
        if (directory / name).is_file():
            refuse_pointer(directory / name)
            try:
                shutil.copyfile(directory / name, target / name)
            except PermissionError as error:
                raise LlmcError(f"'{directory / name}' cannot be read: permission denied; allow "
                                f"reading it") from error
    if (target / "tokenizer.json").is_file():
        return
    from llmc.compiler.frontend import sentencepiece_pair

    if (directory / sentencepiece_pair.SOURCE).is_file():
        sentencepiece_pair.write_tokenizer(directory, target)
    elif any(target.iterdir()):
        from transformers import AutoTokenizer
        try:
            AutoTokenizer.from_pretrained(directory, trust_remote_code=False) \
                .save_pretrained(target)  # None would prompt on the terminal
        except Exception as error:  # transformers raises errors of many types
            raise LlmcError(f"the tokenizer of '{directory}' cannot be converted to "
                            f"tokenizer.json ({reason_of(error)}); put one there") from error
