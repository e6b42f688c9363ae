"""Read a PEFT directory: a LoRA adapter of a model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmc.artifacts.adapter import MAX_RANK
from llmc.artifacts.manifest import SourceFile
from llmc.compiler.frontend.checkpoint import open_safetensors, read_json
from llmc.compiler.frontend.origin import Origin
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTORS = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<part>[AB])(?:\.default)?")
_COPY = ".base_layer.weight"
_MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?")
# Fields of adapter_config.json whose adapters are not the sum of the base and B · A.
_UNSUPPORTED = ("use_qalora", "layer_replication", "alora_invocation_tokens",
                "trainable_token_indices", "arrow_config", "use_bdlora", "lora_bias")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # of init_lora_weights


@dataclass(frozen=True)
class LowRank:
    """The factors of a module's change, `up · down`.

    Args:
        down: float32 [rank, in].
        up: float32 [out, rank], including the adapter's scale.
    """

    down: np.ndarray
    up: np.ndarray


@dataclass(frozen=True)
class ExpertFactors:
    """The factors of one stacked parameter of an MoE layer's experts, before their scale.

    PEFT does not save which parameter of the module it is. Shapes tell them apart.

    Args:
        module: name of the experts.
        down: float32 [num_experts * rank, in], expert by expert.
        up: float32 [out, rank * num_experts], of each rank all experts.
        alpha: lora_alpha.
        alpha_pattern: other values by names of parameters.
        rs: whether the scale is alpha / √rank, not alpha / rank.
    """

    module: str
    down: np.ndarray
    up: np.ndarray
    alpha: float
    alpha_pattern: Mapping[str, float]
    rs: bool

    def stacks(self, num_experts: int, parameter: str) -> tuple[np.ndarray, np.ndarray]:
        """Scaled factors float32 [experts, out, rank] and [experts, rank, in].

        Args:
            num_experts: number of matrices.
            parameter: last part of the parameter's name.
        """
        down = self.down.reshape(num_experts, -1, self.down.shape[1])
        rank = down.shape[1]
        up = self.up.reshape(len(self.up), rank, num_experts).transpose(2, 0, 1)
        alpha = _of_pattern(self.alpha_pattern, f"{self.module}.{parameter}", self.alpha)
        scale = alpha / (math.sqrt(rank) if self.rs else rank)
        return np.ascontiguousarray(up * np.float32(scale)), down


@dataclass(frozen=True)
class PeftAdapter:
    """A LoRA adapter as PEFT stores it.

    Args:
        directory: where it was read.
        modules: factors of linear layers by module name.
        experts: factors of experts that are stacked in one parameter (`target_parameters`).
        embeddings: factors of embeddings; the matrix [vocab, hidden] changes by (up · down)ᵀ.
        magnitudes: DoRA's norms float32 [out] by module name.
        saved: parameters that replace those of the base, by name.
        copies: names of those that PEFT saves beside factors of an embedding or a head; they are
            the base's, which these factors change.
        fan_in_fan_out: whether the base stores these matrices as [in, out].
    """

    directory: Path
    modules: Mapping[str, LowRank]
    experts: Sequence[ExpertFactors]
    embeddings: Mapping[str, LowRank]
    magnitudes: Mapping[str, np.ndarray]
    saved: Mapping[str, Weight]
    copies: frozenset[str]
    fan_in_fan_out: bool


def read_peft(directory: str | Path) -> PeftAdapter:
    """Read a PEFT directory.

    Raises:
        LlmcError: a file is missing or broken, the adapter is of an unsupported kind, its rank is
            above MAX_RANK, or it has NaN or infinite values.
    """
    directory = Path(directory)
    config = _read_config(directory)
    path = directory / WEIGHTS
    if not path.is_file():
        pickled = " its adapter_model.bin is pickled;" \
            if (directory / "adapter_model.bin").is_file() else ""
        raise LlmcError(f"'{directory}' has no {WEIGHTS};{pickled} save the adapter with PEFT's "
                        f"save_pretrained, which writes it")
    factors: dict[re.Pattern[str], dict[str, dict[str, np.ndarray]]] = {
        _FACTORS: {}, _EMBEDDING: {}, _MAGNITUDE: {}}
    saved, copies = dict[str, Weight](), set[str]()
    for key, tensor in open_safetensors(path).items():
        name = key.removeprefix(_PREFIX)
        kind = next((kind for kind in factors if kind.fullmatch(name)), None)
        if kind is None:
            _require_replacement(path, name)
            tensor.require_finite()
            saved[name.replace(".base_layer.", ".")] = tensor
            if name.endswith(_COPY):
                copies.add(name.replace(".base_layer.", "."))
            continue
        match = kind.fullmatch(name)
        assert match is not None
        parts = factors[kind].setdefault(match["module"], {})
        parts[match.groupdict().get("part") or ""] = _load(path, key, tensor)
    experts = _take_experts(path, factors[_FACTORS], config)
    pairs = [{module: _pair(path, module, parts, config) for module, parts in factors[kind].items()}
             for kind in (_FACTORS, _EMBEDDING)]
    if not any(pairs) and not saved and not experts:
        raise LlmcError(f"'{path}' has no adapter's tensors, such as 'X.lora_A.weight'; give a "
                        f"LoRA adapter that PEFT has saved")
    return PeftAdapter(directory, pairs[0], experts, pairs[1],
                       {module: parts[""] for module, parts in factors[_MAGNITUDE].items()},
                       saved, frozenset(copies), bool(config.get("fan_in_fan_out")))


def read_peft_source(directory: str | Path) -> tuple[SourceFile, ...]:
    """Return name, size and digest of each file of a PEFT directory."""
    return Origin([Path(directory) / name for name in (CONFIG, WEIGHTS)]).files()


def _read_config(directory: Path) -> dict[str, Any]:
    """Read and check adapter_config.json."""
    path = directory / CONFIG
    if not path.is_file():
        raise LlmcError(f"'{directory}' has no {CONFIG}, so it is not a PEFT directory; give the "
                        f"directory of a LoRA adapter")
    config = read_json(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise LlmcError(f"'{path}' has peft_type {shown(kind)}, expected 'LORA'; convert the "
                        f"adapter with PEFT, or merge it into its base model")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise LlmcError(f"'{path}' has {name} {shown(config[name])}, which llmc does not "
                            f"support; train the adapter without it, or merge it with PEFT")
    begin = str(config.get("init_lora_weights"))
    if begin.lower().startswith(_CHANGES_BASE):
        raise LlmcError(f"'{path}' has init_lora_weights '{begin}', which changes the base's "
                        f"weights too; save the adapter with PEFT's "
                        f"path_initial_model_for_weight_conversion")
    for name in ("lora_alpha", "r"):
        if isinstance(config.get(name), bool) or not isinstance(config.get(name), int | float):
            raise LlmcError(f"'{path}' has {name} {shown(config.get(name))}, expected a number; "
                            f"correct it")
    for name in ("alpha_pattern", "rank_pattern"):
        given = config.get(name) or {}
        if not isinstance(given, dict) or not all(
                isinstance(value, int | float) for value in given.values()):
            raise LlmcError(f"'{path}' has {name} {shown(given)}, expected names with numbers; "
                            f"correct it")
        for pattern in given:
            try:
                re.compile(pattern)
            except re.error as error:
                raise LlmcError(f"'{path}' has a pattern that is no regular expression ({error}); "
                                f"correct it") from error
    return config


def _take_experts(path: Path, factors: dict[str, dict[str, np.ndarray]],
                  config: Mapping[str, Any]) -> list[ExpertFactors]:
    """Remove the factors of stacked experts from those of linear layers, and return them.

    PEFT wraps the module once for each parameter: X, X.base_layer and so on. A parameter may be a
    single matrix, too, such as a router's.
    """
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise LlmcError(f"'{path.with_name(CONFIG)}' has target_parameters {shown(targets)}, "
                        f"expected names of parameters; correct it")
    modules = [name.rpartition(".")[0] for name in targets]
    found = []
    for wrapped in [*factors]:
        module = re.sub(r"(\.base_layer)+$", "", wrapped)
        if not any(f".{module}".endswith(f".{own}") for own in modules):
            continue
        parts = factors.pop(wrapped)
        down, up = parts.get("A"), parts.get("B")
        if down is None or up is None or down.ndim != 2 or up.ndim != 2 \
                or len(down) != up.shape[1]:
            raise LlmcError(f"'{path}' has no matching lora_A and lora_B of '{wrapped}'; save the "
                            f"adapter again")
        found.append(ExpertFactors(module, down, up, config["lora_alpha"],
                                   config.get("alpha_pattern") or {},
                                   bool(config.get("use_rslora"))))
    return found


def _require_replacement(path: Path, name: str) -> None:
    if "lora_" in name:
        raise LlmcError(f"'{path}' has the tensor '{name}', which is not one of a LoRA adapter "
                        f"that llmc supports; merge the adapter with PEFT")


def _load(path: Path, key: str, tensor: Weight) -> np.ndarray:
    """Read a factor as float32."""
    if not tensor.is_floating:
        raise LlmcError(f"tensor '{key}' in '{path}' is {tensor.dtype}, expected floating point; "
                        f"save the adapter in float32, float16 or bfloat16")
    values: np.ndarray = tensor.load().astype(np.float32)
    if not np.isfinite(values).all():
        raise LlmcError(f"tensor '{key}' in '{path}' has {int(np.isnan(values).sum())} NaN and "
                        f"{int(np.isinf(values).sum())} infinite values; train the adapter again")
    return values


def _pair(path: Path, module: str, parts: Mapping[str, np.ndarray],
          config: Mapping[str, Any]) -> LowRank:
    """Check both factors of a module, and scale the second."""
    down, up = parts.get("A"), parts.get("B")
    if down is None or up is None or down.ndim != 2 or up.ndim != 2 \
            or down.shape[0] != up.shape[1]:
        shapes = [None if part is None else list(part.shape) for part in (down, up)]
        raise LlmcError(f"'{path}' has factors {shapes[0]} and {shapes[1]} of '{module}', expected "
                        f"[rank, in] and [out, rank]; save the adapter again")
    rank = down.shape[0]
    if not 1 <= rank <= MAX_RANK:
        raise LlmcError(f"'{path}' has rank {rank} for '{module}', expected 1 to {MAX_RANK}; train "
                        f"the adapter with a smaller rank, or merge it into its base model")
    alpha = _of_pattern(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(down, (up * np.float32(scale)).astype(np.float32))


def _of_pattern(pattern: Mapping[str, float], name: str, default: float) -> float:
    """Return the value of a PEFT pattern for a module or parameter; keys match ends of names."""
    return next((value for key, value in pattern.items()
                 if re.fullmatch(rf"(.*\.)?({key})", name)), default)


def find_module(name: str, known: Sequence[str]) -> str | None:
    """Return the module of this name; of one end if there is no other.

    A multimodal model's modules have a longer name in PEFT than in its language model.
    """
    if name in known:
        return name
    found = [other for other in known
             if name.endswith(f".{other}") or other.endswith(f".{name}")]
    return found[0] if len(found) == 1 else None
