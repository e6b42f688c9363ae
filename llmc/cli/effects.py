"""Refusal of options that have no effect on a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from llmc.cli.sampling import is_given
from llmc.errors import LlmcError

if TYPE_CHECKING:
    from llmc.artifacts.manifest import Manifest


def _without_gpu(manifest: Manifest) -> str:
    return "" if manifest.target.spec.gpu else f"on target {manifest.target.kind}"


def _without_kv_cache(manifest: Manifest) -> str:
    return "" if manifest.chips[0].kept else f"{_on(manifest)}, which has no KV cache"


def _without_adapters(manifest: Manifest) -> str:
    return "" if manifest.takes_adapters else \
        f"{_on(manifest)}, which was compiled without --enable_lora"


def _without_media(manifest: Manifest) -> str:
    return "" if manifest.media else f"{_on(manifest)}, whose prompts have no images or audio"


def _without_audio_or_images(manifest: Manifest) -> str:
    return "" if manifest.features else _without_media(manifest)


def _without_encoder_cache(manifest: Manifest) -> str:
    return f"{_on(manifest)}, which stores images as cross-attention KV" if manifest.memory \
        else _without_media(manifest)


def _without_decoding(manifest: Manifest) -> str:
    pooling = manifest.pooling
    return "" if pooling is None else f"{_on(manifest)}, which was compiled for task {pooling.task}"


def _without_prefix_caching(manifest: Manifest) -> str:
    if manifest.mem_max_seq_len:  # encoder outputs are shared
        return ""
    if any(chip.states for chip in manifest.chips):
        return f"{_on(manifest)}, which has recurrent state"
    return f"{_on(manifest)}, which reads each text in one step" if manifest.is_whole else ""


def _on(manifest: Manifest) -> str:
    return f"on '{manifest.source.architecture}'"


# By option: where it has no effect; "": it has one.
_LACKS: dict[str, Callable[[Manifest], str]] = {
    "max_itl_ms": _without_decoding,
    "block_size": _without_kv_cache,
    "kv_cache_tokens": _without_kv_cache,
    "gpu_memory_utilization": _without_gpu,
    "prefix_reuse": _without_prefix_caching,
    "num_speculative_tokens": _without_decoding,
    "max_loras": _without_adapters,
    "max_lora_rank": _without_adapters,
    "allow_runtime_lora_updating": _without_adapters,
    "encoder_cache_gb": _without_encoder_cache,
    "limit_mm_per_prompt": _without_media,
    "allowed_media_domains": _without_media,
    "allowed_media_networks": _without_media,
    "allowed_local_media_path": _without_media,
    "media_timeout": _without_media,
    "max_media_bytes": _without_media,
    "media_memory_gb": _without_media,
    "max_media_request_bytes": _without_audio_or_images,
    "tool_call_parser": _without_decoding,
    "reasoning_parser": _without_decoding,
    "chat_template_content_format": _without_decoding,
    "generation_config": _without_decoding,
    "response_store_mb": _without_decoding,
    "response_store_ttl": _without_decoding,
    "check_step": _without_gpu,
    "skip_step": _without_gpu,
}


def refuse_without_effect(*manifests: Manifest) -> None:
    """Refuse given options of the current command that have no effect on any of the models.

    Raises:
        LlmcError: there is one.
    """
    options = click.get_current_context().params
    for option, lack in _LACKS.items():
        if options.get(option, False) is False or not is_given(option):
            continue
        places = [lack(manifest) for manifest in manifests]
        if all(places):
            raise LlmcError(f"--{option} has no effect {places[0]}; leave it out")
