"""Checks before export: options alone, then options against the model's config.

The passes verify the exported graph again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.compiler.frontend.checkpoint import read_json
from llmc.compiler.frontend.draft import DraftSource, refuse_target
from llmc.compiler.frontend.huggingface import find_directory
from llmc.compiler.frontend.raw import architecture_of, token_ids
from llmc.compiler.options import LANGUAGE_MODEL_ONLY, OPTIONS, TASKS, CompileOptions
from llmc.compiler.quant.checkpoint import method_of
from llmc.compiler.quant.scheme import QUANTIZED_WAYS_OUT, SMALLEST_GROUP
from llmc.errors import LlmcError
from llmc.plugins.pool.op import KINDS
from llmc.plugins.quantization import FLOAT8, INT8
from llmc.runtime.multimodal.items import PLURALS, Modality
from llmc.targets import TARGETS, target_spec

TESTED_TRANSFORMERS = ("5.23", "5.24")  # the first and last minor release of `make test-bounds`
_DEFAULT_MAX_SEQ_LEN = 4096
# Names in configs of the experts per token, and of all experts of a layer.
_TOP_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk",
                "top_k_experts")
_ALL_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

_ACTIVATIONS_ALONE = "quantize_activations is given without quantize fp8 or int8; give both, as " \
    "quantized activations need FP8 or int8 weights"


# Aliases of transformers and vLLM; and short names, which are rejected with a suggestion.
_ALIASES = {"half": "float16", "float": "float32"}
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32",
                 "f32": "float32"}


def read_dtype(dtype: object, target: object, model: str | Path) -> str:
    """Resolve a dtype to the options' name for it.

    Args:
        dtype: a name or alias, a torch dtype, or `auto`: the checkpoint's dtype if the target
            supports it, else the target's last: 16-bit, or its only one.
        target: name of the target.
        model: the model, which `auto` reads.

    Raises:
        LlmcError: `auto` is given and the model does not exist.
    """
    name = str(dtype).removeprefix("torch.")
    if name != "auto":
        return _ALIASES.get(name, name)
    dtypes = TARGETS[target].dtypes if isinstance(target, str) and target in TARGETS \
        else ("float32",)
    config: dict[str, Any] = {}
    if Path(model).suffix not in (".gguf", ".onnx"):
        config = read_json(find_directory(model) / "config.json")
    text = config.get("text_config") or config
    named = (part.get(key) for key in ("dtype", "torch_dtype") for part in (config, text))
    return str(next((known for known in named if known in dtypes), dtypes[-1]))


@dataclass(frozen=True)
class About:
    """Facts about a model that need no graph.

    Args:
        config: contents of config.json.
        generation: contents of generation_config.json.
        has_encoder: whether the model is an encoder-decoder model.
        quantized: quantization method, where the config does not name it.
        task: what the model is compiled for.
        media: kinds of items of prompts whose encoders are compiled.
        multimodal: whether it has encoders of images or audio, compiled or not.
    """

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    has_encoder: bool
    quantized: str = ""
    task: str = "generate"
    media: Sequence[Modality] = ()
    multimodal: bool = False

    @property
    def name(self) -> str:
        return architecture_of(self.config)

    @property
    def text(self) -> Mapping[str, Any]:
        """The text config, or the whole config if it has none."""
        return self.config.get("text_config") or self.config

    def number(self, *keys: str) -> int | None:
        """Return the value of the first key that is an integer in the text config."""
        return next((self.text[key] for key in keys if isinstance(self.text.get(key), int)), None)

    @property
    def switches_at(self) -> int | None:
        """Maximum length for longrope's short factors; None without longrope."""
        key = "original_max_position_embeddings"
        rope = self.text.get("rope_scaling") or self.text.get("rope_parameters") or {}
        return (rope.get(key) or self.number(key)) if "long_factor" in rope else None

    @property
    def num_heads(self) -> int | None:
        """Minimum number of attention heads of encoder and decoder."""
        counts = [heads for key in ("num_attention_heads", "n_head", "n_heads", "num_heads",
                                    "encoder_attention_heads", "decoder_attention_heads")
                  if (heads := self.number(key))]
        return min(counts, default=None)

    @property
    def head_dim(self) -> int | None:
        """Head size by the config; None if unknown, as with latent attention."""
        if self.number("kv_lora_rank", "state_size"):
            return None
        dim, hidden = self.number("head_dim", "d_kv"), self.number("hidden_size", "n_embd",
                                                                   "d_model")
        if dim is None and hidden and self.num_heads and hidden % self.num_heads == 0:
            return hidden // self.num_heads
        return dim


def check_options(options: CompileOptions) -> None:
    """Reject options that are invalid for every model.

    Raises:
        LlmcError: names the option, its value and what is allowed.
    """
    for check in OPTION_CHECKS.values():
        problem = check(options)
        if problem:
            raise LlmcError(problem)


def check_model(options: CompileOptions, about: About) -> None:
    """Reject options that are invalid for this model.

    Raises:
        LlmcError: names the option, its value and what is allowed.
    """
    for check in MODEL_CHECKS.values():
        problem = check(options, about)
        if problem:
            raise LlmcError(problem)


def warn_untested_transformers(version: str) -> str | None:
    """Return a warning for a release outside `TESTED_TRANSFORMERS`; None within it.

    Args:
        version: the installed version of transformers, such as `5.24.1`.
    """
    minor, *tested = (tuple(map(int, re.findall(r"\d+", text)[:2]))
                      for text in (version, *TESTED_TRANSFORMERS))
    if tested[0] <= minor <= tested[1]:
        return None
    first, last = TESTED_TRANSFORMERS
    return f"warning: transformers {version} is untested; this llmc was tested with {first} to " \
        f"{last}. Compare the result with `llmc diff`, or install a tested release"


def limit_seq_len(about: About, wish: int | None, target: str, prefix: str = "") -> int:
    """Return the maximum number of positions of a sequence.

    Args:
        about: the model.
        wish: the requested maximum; None: the target's default, or all positions of the model
            where the KV cache is paged.
        target: name of the target.
        prefix: prefix of the option's name in errors.

    Raises:
        LlmcError: the model does not support `wish` positions.
    """
    keys = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length",
            "max_target_positions")
    limit = about.number(*keys)
    if limit is not None and limit < 2:
        raise LlmcError(f"'{about.name}' has max_position_embeddings {limit}, expected at least 2; "
                        f"correct its config")
    if wish is not None and about.switches_at is not None and wish > about.switches_at:
        raise LlmcError(f"{prefix}max_seq_len {wish} is not supported: '{about.name}' has a "
                        f"different rotary embedding (longrope) beyond {about.switches_at} tokens; "
                        f"compile with --max_seq_len of at most {about.switches_at}")
    top_keys = about.number("index_topk")  # sparse attention is dense up to this length
    if top_keys is not None and wish is not None and wish > top_keys:
        raise LlmcError(f"{prefix}max_seq_len {wish} is not supported: beyond index_topk "
                        f"{top_keys} the attention of '{about.name}' is sparse; allowed: 2 to "
                        f"{top_keys}")
    if top_keys is not None:
        limit = min(limit or top_keys, top_keys)
    if wish is None:
        default = target_spec(target).default_max_seq_len
        if default is None and limit and not about.has_encoder:
            most = limit
        else:
            default = default or _DEFAULT_MAX_SEQ_LEN
            most = min(limit or default, default)
        return min(most, about.switches_at or most)
    if about.has_encoder and about.number(keys[0]) is None:
        limit = None  # T5's n_positions is its training length; relative positions have no limit
    if wish < 2 or (limit is not None and wish > limit):
        raise LlmcError(f"{prefix}max_seq_len {wish} is not supported: '{about.name}' has "
                        f"max_position_embeddings {limit}; allowed: 2 to {limit or 'any'}")
    return wish


# Checks: each returns a problem, or None.

def _declared(options: CompileOptions) -> str | None:
    return next((problem for option in OPTIONS
                 if (problem := option.problem(getattr(options, option.name)))), None)


def _target(options: CompileOptions) -> str | None:
    try:
        target_spec(options.target)
    except LlmcError as error:
        return str(error)
    return None


def _dtype(options: CompileOptions) -> str | None:
    dtypes = target_spec(options.target).dtypes
    if options.dtype in dtypes:
        return None
    full = _SHORT_DTYPES.get(options.dtype, "")
    hint = f"did you mean '{full}'? Supported" if full in dtypes else "supported"
    return f"target '{options.target}' has no dtype '{options.dtype}'; {hint}: {', '.join(dtypes)}"


def _kv_dtype(options: CompileOptions) -> str | None:
    kv_dtypes = target_spec(options.target).kv_dtypes
    if not options.kv_dtype or options.kv_dtype in kv_dtypes:
        return None
    return (f"target '{options.target}' has no kv_dtype '{options.kv_dtype}'; leave it out"
            f"{''.join(f', or give {name}' for name in kv_dtypes)}")


def _schemes(options: CompileOptions) -> str | None:
    dtypes = target_spec(options.target).weight_dtypes
    for scheme in (options.scheme, options.head_scheme, options.encoder_scheme):
        if scheme is None:
            continue
        if not dtypes:
            return (f"target '{options.target}' has no kernels for quantized weights, so it does "
                    f"not support --quantize; compile for --target cpu, or leave it out")
        if scheme.dtype not in dtypes:
            return (f"weights cannot be quantized to '{scheme.dtype}'; allowed: int8, int4, "
                    f"uint4, fp8")
        if scheme.group_size < 0 or scheme.group_size % 2 or \
                0 < scheme.group_size < SMALLEST_GROUP:
            return (f"group_size {scheme.group_size} is not an even number of at least "
                    f"{SMALLEST_GROUP}; give 32, 64 or 128, which most kernels support")
        multiple = target_spec(options.target).group_multiple
        if scheme.group_size % multiple:
            return (f"group_size {scheme.group_size} is not a multiple of {multiple}, as kernels "
                    f"of target '{options.target}' need; give 32, 64 or 128")
    if options.quantize_activations and (options.dequantize if options.scheme is None else
                                         options.scheme.dtype not in (FLOAT8, INT8)):
        return _ACTIVATIONS_ALONE
    if options.quantize_activations and options.scheme is not None \
            and options.scheme.dtype == INT8:
        if not target_spec(options.target).int8_activations:
            return (f"target '{options.target}' has no kernels for int8 activations; leave out "
                    f"quantize_activations, or give quantize fp8")
        for name, given in (("group_size", options.group_size), ("calibrate", options.calibrate)):
            if given:
                return (f"{name} is given, but int8 weights with quantize_activations have a "
                        f"scale per row and are not calibrated; leave it out")
    if options.head_scheme is not None and options.scheme is None:
        return "quantize_lm_head is given without quantize; give both"
    if options.group_size and options.scheme is None:
        return "group_size is given without quantize; give both"
    if options.calibrated and options.scheme is None:
        return "calibrate is given without quantize; give both"
    if options.requantize and options.scheme is None:
        return "requantize is given without quantize; give both"
    return None


def _compute_capability(options: CompileOptions) -> str | None:
    if options.compute_capability is None:
        return None
    if "compute_capability" not in target_spec(options.target).optional_fields:
        return f"target '{options.target}' has no compute_capability; leave it out"
    if not re.fullmatch(r"[1-9]\d*\.\d", options.compute_capability):
        return f"compute_capability '{options.compute_capability}' is not a number like 9.0"
    return None


def _tp_size(options: CompileOptions) -> str | None:
    if options.tp_size > 1 and not target_spec(options.target).collectives:
        return f"target '{options.target}' has no collectives; compile with --tp_size 1"
    return None


def _expert_parallel(options: CompileOptions) -> str | None:
    if options.expert_parallel and options.tp_size == 1:
        return "expert_parallel is given with tp_size 1; give more chips, or leave it out"
    return None


def _task(options: CompileOptions) -> str | None:
    for name, value, known in (("task", options.task, TASKS), ("pooling", options.pooling, KINDS)):
        if value and value not in known:
            return f"{name} '{value}' is unknown; use one of: {', '.join(known)}"
    tokens = options.classifier_from_token.split(",") if options.classifier_from_token else []
    if len(tokens) > 2 or not all(tokens):
        return (f"classifier_from_token is '{options.classifier_from_token}', expected one token, "
                f"or two with a comma between them, as in no,yes")
    for name, given in (("classifier_from_token", tokens), ("score_template",
                                                            options.score_template)):
        if given and options.task not in ("", "classify"):
            return f"{name} is given with task {options.task}; leave it out, or give task classify"
    return None


def _max_batch_size(options: CompileOptions) -> str | None:
    spec, default = target_spec(options.target), CompileOptions.max_batch_size
    if options.max_batch_size == default or "max_batch_size" in spec.required_fields:
        return None
    return (f"max_batch_size {options.max_batch_size} is given, but target '{options.target}' has "
            f"no compiled maximum; leave it out, and give it to `llmc run` or `llmc serve`")


def _draft(options: CompileOptions) -> str | None:
    if options.draft is None:
        return None
    try:
        DraftSource.of(options.draft)
    except LlmcError as error:
        return str(error)
    return refuse_target(target_spec(options.target))


def _pooled(options: CompileOptions, about: About) -> str | None:
    if options.score_template and about.task != "classify":
        return (f"score_template is given, but '{about.name}' is compiled for task {about.task}; "
                f"give --task classify, or leave it out")
    if about.task == "generate":
        return None
    if not target_spec(options.target).pools:
        poolers = " or ".join(name for name, target in TARGETS.items() if target.pools)
        return (f"task {about.task} is not supported by target '{options.target}'; compile with "
                f"--target {poolers}")
    for name, given in (("draft", options.draft), ("calibrate", options.calibrate),
                        ("quantize_lm_head", options.quantize_lm_head),
                        ("mem_max_seq_len", options.mem_max_seq_len)):
        if given:
            return (f"{name} is given, but '{about.name}' is compiled for task {about.task}, which "
                    f"does not support it; leave it out")
    return None


def _enable_lora(options: CompileOptions) -> str | None:
    if not options.enable_lora or target_spec(options.target).adapters:
        return None
    takers = " and ".join(name for name, target in TARGETS.items() if target.adapters)
    return (f"enable_lora is given for target '{options.target}', but adapters run on targets "
            f"{takers}; compile for one of these, or merge one with --adapter")


def _enable_lora_of(options: CompileOptions, about: About) -> str | None:
    if not options.enable_lora or not about.has_encoder:
        return None
    return (f"'{about.name}' is an encoder-decoder model, which adapters do not support; leave out "
            f"--enable_lora, or merge one with --adapter")


def _enable_prompt_embeds(options: CompileOptions) -> str | None:
    if not options.enable_prompt_embeds or target_spec(options.target).embeds:
        return None
    takers = " or ".join(name for name, spec in TARGETS.items() if spec.embeds)
    return (f"enable_prompt_embeds is given for target '{options.target}', but prompt embeddings "
            f"run on target {takers}; compile for one of these, or leave out "
            f"--enable_prompt_embeds")


def _enable_prompt_embeds_of(options: CompileOptions, about: About) -> str | None:
    if not options.enable_prompt_embeds or not (about.has_encoder or about.task != "generate"):
        return None
    kind = "an encoder-decoder model" if about.has_encoder else f"compiled for task {about.task}"
    return (f"'{about.name}' is {kind}, which prompt embeddings do not support; leave out "
            f"--enable_prompt_embeds")


def _media(options: CompileOptions, about: About) -> str | None:
    if not about.media or target_spec(options.target).media_encoders:
        return None
    takers = " or ".join(name for name, target in TARGETS.items() if target.media_encoders)
    names = " and ".join(PLURALS[own] for own in about.media)
    return (f"'{about.name}' takes {names}, which target '{options.target}' does not support; "
            f"compile with --target {takers}, or {LANGUAGE_MODEL_ONLY}")


def _language_model_only(options: CompileOptions, about: About) -> str | None:
    if not options.language_model_only or about.multimodal:
        return None
    return (f"language_model_only is given, but '{about.name}' has no encoders of images or audio "
            f"in prompts; leave it out")


def _quantize_encoders(options: CompileOptions, about: About) -> str | None:
    if options.encoder_scheme is None or about.media:
        return None
    return (f"quantize_encoders is given, but '{about.name}' is compiled without encoders of "
            f"images or audio; leave it out")


def _draft_of(options: CompileOptions, about: About) -> str | None:
    if options.draft is None or not about.has_encoder:
        return None
    return (f"'{about.name}' is an encoder-decoder model, which draft models do not support; leave "
            f"out --draft")


def _quantized_already(options: CompileOptions, about: About) -> str | None:
    method = method_of(about.config)
    if method is None and options.quantize_activations and options.scheme is None:
        return _ACTIVATIONS_ALONE
    method = method or about.quantized
    if not method or options.scheme is None or options.requantize:
        return None
    return f"'{about.name}' is quantized by {method} already; {QUANTIZED_WAYS_OUT}"


def _encoder(options: CompileOptions, about: About) -> str | None:
    if about.has_encoder and not target_spec(options.target).encoders:
        return (f"'{about.name}' is an encoder-decoder model, which target '{options.target}' does "
                f"not support; compile it with --target cpu, cuda or tensorrt")
    # Layers may attend to images, which only the model itself shows.
    if not about.has_encoder and "image" not in about.media and options.mem_max_seq_len is not None:
        return (f"mem_max_seq_len {options.mem_max_seq_len} is given, but '{about.name}' has no "
                f"encoder; leave it out")
    return None


def _calibrated(options: CompileOptions, about: About) -> str | None:
    if not about.has_encoder or not options.calibrated:
        return None
    return (f"'{about.name}' is an encoder-decoder model, which --calibrate does not support, as "
            f"it would need pairs of prompt and answer; leave it out")


def _decoder_start(options: CompileOptions, about: About) -> str | None:
    if not about.has_encoder or any(token_ids(key, about.config, about.generation)
                                    for key in ("decoder_start_token_id", "bos_token_id")):
        return None
    return (f"'{about.name}' has no decoder_start_token_id; add it to generation_config.json")


def _experts(options: CompileOptions, about: About) -> str | None:
    top, count = (next(((key, number) for key in keys if (number := about.number(key))), None)
                  for keys in (_TOP_EXPERTS, _ALL_EXPERTS))
    if top is None or count is None or top[1] <= count[1]:
        return None
    return (f"'{about.name}' selects {top[0]} {top[1]} of {count[0]} {count[1]}; correct its "
            f"config: {top[0]} must be at most {count[1]}")


def _heads(options: CompileOptions, about: About) -> str | None:
    heads = about.num_heads
    if heads is None or options.tp_size <= heads:
        return None
    return (f"tp_size {options.tp_size} exceeds num_attention_heads {heads} of '{about.name}'; "
            f"allowed: 1 to {heads}")


def _positions(options: CompileOptions, about: About) -> str | None:
    try:
        limit_seq_len(about, options.max_seq_len, options.target)
        if about.has_encoder:
            limit_seq_len(about, options.mem_max_seq_len, options.target, "mem_")
    except LlmcError as error:
        return str(error)
    return None


def _head_dim(options: CompileOptions, about: About) -> str | None:
    dim, most = about.head_dim, target_spec(options.target).max_head_dim
    if most is None or dim is None or (dim % 8 == 0 and dim <= most):
        return None
    return (f"head_dim {dim} of '{about.name}' is not a multiple of 8 of at most {most}, as "
            f"attention kernels need; compile for --target cpu")


OPTION_CHECKS: dict[str, Callable[[CompileOptions], str | None]] = {
    "types and ranges": _declared,  # first: the others rely on it
    "target": _target,  # before checks against the target's capabilities
    "dtype": _dtype,
    "kv_dtype": _kv_dtype,
    "schemes": _schemes,
    "compute_capability": _compute_capability,
    "tp_size": _tp_size,
    "expert_parallel": _expert_parallel,
    "task": _task,
    "max_batch_size": _max_batch_size,
    "draft": _draft,
    "enable_lora": _enable_lora,
    "enable_prompt_embeds": _enable_prompt_embeds,
}
MODEL_CHECKS: dict[str, Callable[[CompileOptions, About], str | None]] = {
    "quantized already": _quantized_already,
    "encoder": _encoder,
    "pooled": _pooled,
    "draft": _draft_of,
    "enable_lora": _enable_lora_of,
    "enable_prompt_embeds": _enable_prompt_embeds_of,
    "media": _media,
    "language_model_only": _language_model_only,
    "quantize_encoders": _quantize_encoders,
    "calibrated": _calibrated,
    "decoder start": _decoder_start,
    "experts": _experts,
    "heads": _heads,
    "positions": _positions,
    "head_dim": _head_dim,
}
