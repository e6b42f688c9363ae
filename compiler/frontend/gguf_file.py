"""GGUF files: config and tokenizer by transformers, lazy weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, dequantize

from llmc.compiler.frontend.checkpoint import read_rows
from llmc.compiler.frontend.gguf_header import GgufHeader, GgufTensor, read_header
from llmc.compiler.frontend.gguf_tokenizer import complete_tokenizer, end_tokens, sampling
from llmc.compiler.frontend.origin import Origin
from llmc.compiler.frontend.raw import Check, RawModel, unchecked
from llmc.compiler.frontend.sizes import check_sizes
from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant.readers.gguf import form_of
from llmc.compiler.scratch import scratch_folder
from llmc.errors import MAX_REASON, LlmcError, shortened

# Types that are not quantized.
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
           "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
_ROPE_FACTORS = "rope_freqs.weight"
_TABLE = "token_embd.weight"
_TOKENIZER, _NO_TOKENIZER = "tokenizer.ggml.model", ("", "none", "no_vocab")
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # the only values that GGUF converters write


def load_gguf(path: Path, check: Check = unchecked, *, takes_embeds: bool = False) -> RawModel:
    """Export the model in a GGUF file.

    Raises:
        LlmcError: the file is broken, or transformers does not support its architecture or
            tokenizer.
    """
    header = read_header(path)
    check_sizes(header.numbers(), path)
    parts = header.number("split.count")
    if parts > 1:
        raise LlmcError(f"'{path}' is one of {parts} files of a model; join them with "
                        f"llama-gguf-split --merge")
    kinds = sorted({tensor.kind.name for tensor in header.tensors if len(tensor.shape) > 1
                    and tensor.kind.name not in _DTYPES and tensor.name != _TABLE})
    quantized = f"GGUF ({', '.join(kinds)})" if kinds else ""
    # Check the header first, as importing transformers takes seconds.
    check({"model_type": header.text("general.architecture")}, {}, False, quantized)
    from llmc.compiler.frontend.export import export

    config = _read_config(path, header)
    if config.is_encoder_decoder:
        raise LlmcError(f"'{path}' contains an encoder-decoder model, which llmc reads only from a "
                        f"Hugging Face directory; give that")
    _scale_rope(path, header, config)
    plain = config.to_dict()
    if not plain.get("architectures"):
        plain["architectures"] = [type(config).__name__.replace("Config", "ForCausalLM")]
    check(plain, {}, False, quantized)
    tokenizer = _tokenizer_files(path, header, config)  # errors before the slow export
    tensors = _tensors(path, header, config)
    exported = export(config, tensors, str(path), takes_embeds=takes_embeds)

    return RawModel(exported.graph, plain, "gguf", partial(_write_files, tokenizer),
                    sampling(header),
                    (*_notes(header, tensors), *exported.notes),
                    origin=Origin((path,)), end_tokens=partial(end_tokens, header))


def _write_files(files: Mapping[str, bytes], folder: Path) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _notes(header: GgufHeader, tensors: Mapping[str, Weight]) -> list[str]:
    """Return notes about weights read as float32."""
    notes = []
    count = sum(tensor.dequantized for tensor in tensors.values())
    kinds = sorted({tensor.kind.name for tensor in header.tensors if len(tensor.shape) > 1
                    and tensor.kind.name not in _DTYPES})
    if count:
        notes.append(f"{count} weights among those in {', '.join(kinds)} have a format without "
                     f"kernels: they are dequantized to float32, with its memory use and speed")
    return notes


def _tokenizer_files(path: Path, header: GgufHeader, config: Any) -> dict[str, bytes]:
    """Return the tokenizer's files by name; empty if the GGUF file has no tokenizer.

    Raises:
        LlmcError: transformers cannot convert the tokenizer.
    """
    kind = header.text(_TOKENIZER)
    if kind in _NO_TOKENIZER:
        return {}
    with scratch_folder() as folder:
        try:
            _tokenizer_class(path, config).from_pretrained(path.parent, gguf_file=path.name) \
                .save_pretrained(folder)
            complete_tokenizer(header, folder)
        except Exception as error:  # transformers raises errors of many types
            raise LlmcError(f"transformers cannot convert the tokenizer of '{path}' "
                            f"('{_TOKENIZER}' is '{kind}'; {_line(error)}); give the model's "
                            f"Hugging Face directory") from error
        return {str(file.relative_to(folder)): file.read_bytes()
                for file in folder.rglob("*") if file.is_file()}


def _read_config(path: Path, header: GgufHeader) -> Any:
    """Read the transformers config.

    Where the config needs only the vocabulary's size, from a copy of the file without vocabulary
    and tensors, which is faster.
    """
    from transformers import AutoConfig
    from transformers.integrations import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

    architecture = header.text("general.architecture")
    try:
        if architecture in GGUF_CONFIG_ARCHS \
                or "vocab_size" not in GGUF_CONFIG_MAPPING.get(architecture, {}):
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        with scratch_folder() as folder:
            (folder / path.name).write_bytes(header.without_vocabulary())
            return AutoConfig.from_pretrained(folder, gguf_file=path.name)
    except LlmcError:
        raise
    except Exception as error:  # gguf and transformers raise errors of many types
        if f"architecture {architecture} is not supported" in str(error):
            raise LlmcError(f"'{path}' has a model of architecture '{architecture}', which "
                            f"transformers does not read from GGUF files; give the model's Hugging "
                            f"Face directory") from error
        raise LlmcError(f"'{path}' cannot be read as GGUF ({_line(error)}); download it again, or "
                        f"give the model's Hugging Face directory") from error


def _line(error: Exception) -> str:
    return shortened(str(error), MAX_REASON) or repr(error)


def _tokenizer_class(path: Path, config: Any) -> Any:
    """Return the tokenizer class; AutoTokenizer, which reads the config again, as fallback."""
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING, TokenizersBackend

    mapped = TOKENIZER_MAPPING.get(type(config), TokenizersBackend)
    configured = getattr(config, "tokenizer_class", None) \
        or (path.parent / "tokenizer_config.json").is_file()
    if configured or mapped is None or mapped.__name__ == "MistralCommonBackend":
        return AutoTokenizer
    return mapped


def _tensors(path: Path, header: GgufHeader, config: Any) -> dict[str, Weight]:
    """Return lazy tensors by their Hugging Face names.

    Raises:
        LlmcError: a tensor has no such name, or an unsupported layout.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    architecture = header.text("general.architecture")
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # inconsistent sizes or tokens raise errors of many types
        raise LlmcError(f"transformers cannot build a model from '{type(config).__name__}' of "
                        f"'{path}' ({_line(error)}); give another file") from error
    names = get_gguf_hf_weights_map(model, processor)
    weights: dict[str, Weight] = {}
    for tensor in header.tensors:
        weight = _weight(path, tensor)
        if tensor.name in names:
            weights[names[tensor.name]] = _processed(weight, tensor.name, processor, names, path)
        elif tensor.name != _ROPE_FACTORS:  # read by _scale_rope
            raise LlmcError(f"'{path}' has a tensor '{tensor.name}' {list(tensor.shape)} "
                            f"{tensor.kind.name}, which the model of '{type(config).__name__}' "
                            f"does not have; give the model's Hugging Face directory")
    return weights


def _scale_rope(path: Path, header: GgufHeader, config: Any) -> None:
    """Set the config's RoPE scaling from the file, as transformers does not read it.

    Raises:
        LlmcError: the scaling is not Llama 3's.
    """
    scaling = header.text(f"{header.text('general.architecture')}.rope.scaling.type")
    rope = getattr(config, "rope_parameters", None) or {}
    tensor = next((t for t in header.tensors if t.name == _ROPE_FACTORS), None)
    factors = np.ones(1) if tensor is None else _weight(path, tensor).load().astype(np.float64)
    if rope.get("rope_type", "default") == "default" and (factors != 1).any():
        dim = getattr(config, "head_dim", None) \
            or config.hidden_size // config.num_attention_heads
        scaled = {**rope, **_LLAMA3, "factor": float(factors.max())}
        if len(factors) == dim // 2 and np.allclose(factors, _llama3_factors(scaled, dim), 1e-4):
            config.rope_parameters = scaled
            return
        scaling = f"by '{_ROPE_FACTORS}'"
    if scaling not in ("", "none") and rope.get("rope_type", "default") == "default":
        raise LlmcError(f"'{path}' scales its rotary embedding ({scaling}), which transformers "
                        f"does not read from GGUF files; give the model's Hugging Face directory")


def _llama3_factors(rope: Mapping[str, Any], dim: int) -> np.ndarray:
    """Return Llama 3's divisors of rotary frequencies, `[dim / 2]`.

    1 for short wavelengths, `factor` for long ones, interpolated in between.
    """
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    divisors: np.ndarray = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return divisors


def _weight(path: Path, tensor: GgufTensor) -> Weight:
    dtype = _DTYPES.get(tensor.kind.name)
    if dtype is not None:
        return Weight(tensor.shape, dtype, partial(read_rows, path, tensor.offset, tensor.shape,
                                                   np.dtype(dtype)), tensor.name)
    if len(tensor.shape) == 1:  # blocks span several rows, which have one element
        return Weight(tensor.shape, np.float32,
                      lambda start, stop: _dequantized(path, tensor)[start:stop], tensor.name)
    stored = None
    if len(tensor.shape) == 2:
        rows, width = tensor.shape
        stored = form_of(tensor.kind.name, (rows, width), tensor.name, partial(
            read_rows, path, tensor.offset, (rows, tensor.nbytes // rows), np.dtype(np.uint8)))
    weight = Weight(tensor.shape, np.float32, partial(_dequantized, path, tensor), tensor.name,
                    stored)
    weight.dequantized = stored is None
    return weight


def _dequantized(path: Path, tensor: GgufTensor, start: int = 0, stop: int | None = None) -> \
        np.ndarray:
    """Dequantize rows of axis 0 to float32. A row consists of whole blocks."""
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    stop = rows if stop is None else stop
    data = read_rows(path, tensor.offset, (rows, tensor.nbytes // rows), np.dtype(np.uint8), start,
                     stop)
    try:
        values = dequantize(data, GGMLQuantizationType(tensor.kind))
    except NotImplementedError as error:
        raise LlmcError(f"tensor '{tensor.name}' in '{path}' is quantized as {tensor.kind.name}, "
                        f"which gguf cannot dequantize; give another quantization") from error
    return values.reshape((-1, *tensor.shape[1:]))


def _processed(weight: Weight, name: str, processor: Any, names: Mapping[str, str], path: Path) -> \
        Weight:
    """Apply transformers' processing of a tensor lazily.

    Raises:
        LlmcError: the architecture's processing is unsupported, such as merging tensors.
    """
    def process(values: np.ndarray) -> np.ndarray:
        result = processor.process(weights=values, name=name, tensor_key_mapping=names,
                                   parsed_parameters={"tensors": {}})
        return np.asarray(result.weights)

    kind = type(processor).__name__
    if not weight.is_floating:
        return weight
    weight = weight.cast(np.float32)
    if kind in ("TensorProcessor", "Gemma2TensorProcessor", "NemotronTensorProcessor"):
        if len(weight.shape) > 1:  # only norms are changed
            probe = np.arange(weight.shape[1], dtype=np.float32)[None]
            if np.array_equal(process(probe), probe):
                return weight
        return Weight(weight.shape, np.float32,
                      lambda start, stop: process(weight.rows(start, stop)), name)
    if kind == "LlamaTensorProcessor":  # rows of q_proj and k_proj are permuted
        try:
            rows = process(np.arange(weight.shape[0]))
        except ValueError as error:
            raise LlmcError(f"tensor '{name}' {list(weight.shape)} in '{path}' does not match the "
                            f"number of heads in the metadata; download the file again") from error
        return weight.take_rows(rows)
    if kind == "GPT2TensorProcessor":
        transposed = len(weight.shape) == 2 \
            and process(np.zeros((1, 2), np.float32)).shape == (2, 1)
        return weight.transpose() if transposed else weight
    raise LlmcError(f"'{path}' has an architecture ({kind}) whose GGUF weight layout llmc does not "
                    f"support; give its Hugging Face directory")
