"""A .gguf file: config and tokenizer through transformers; weights as their blocks store them, or
dequantised as they are read.
"""

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

# What is not quantised.
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
           "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
_ROPE_FACTORS = "rope_freqs.weight"
_TABLE = "token_embd.weight"
_TOKENIZER, _NO_TOKENIZER = "tokenizer.ggml.model", ("", "none", "no_vocab")
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # all that GGUF converters know


def load_gguf(path: Path, check: Check = unchecked) -> RawModel:
    """Export the model in a GGUF file.

    Raises:
        LlmcError: the file is broken, or transformers does not know its architecture or tokenizer.
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
    # First by what the header says: importing transformers takes seconds.
    check({"model_type": header.text("general.architecture")}, {}, False, quantized)
    from llmc.compiler.frontend.export import export

    config = _read_config(path, header)
    if config.is_encoder_decoder:
        raise LlmcError(f"'{path}' holds an encoder-decoder model, which llmc reads from a Hugging "
                        f"Face directory only; give that")
    _scale_rope(path, header, config)
    plain = config.to_dict()
    if not plain.get("architectures"):
        plain["architectures"] = [type(config).__name__.replace("Config", "ForCausalLM")]
    check(plain, {}, False, quantized)
    tokenizer = _tokenizer_files(path, header, config)  # rather now than after the export
    tensors = _tensors(path, header, config)
    exported = export(config, tensors, str(path))

    return RawModel(exported.graph, plain, "gguf", partial(_write_files, tokenizer),
                    sampling(header),
                    (*_notes(header, tensors, bool(tokenizer)), *exported.notes),
                    origin=Origin((path,)), end_tokens=partial(end_tokens, header))


def _write_files(files: Mapping[str, bytes], folder: Path) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _notes(header: GgufHeader, tensors: Mapping[str, Weight], has_tokenizer: bool) -> list[str]:
    """What the user may not expect: weights read as float32, no tokenizer."""
    notes = []
    count = sum(tensor.dequantized for tensor in tensors.values())
    kinds = sorted({tensor.kind.name for tensor in header.tensors if len(tensor.shape) > 1
                    and tensor.kind.name not in _DTYPES})
    if count:
        notes.append(f"{count} weights among those in {', '.join(kinds)} have no form that kernels "
                     f"read: they are read as float32, with its memory and speed")
    if not has_tokenizer:
        notes.append("the file names no tokenizer: the model takes and returns token ids")
    return notes


def _tokenizer_files(path: Path, header: GgufHeader, config: Any) -> dict[str, bytes]:
    """The files of the tokenizer by name; empty where the GGUF file names none.

    Raises:
        LlmcError: transformers cannot convert it.
    """
    kind = header.text(_TOKENIZER)
    if kind in _NO_TOKENIZER:
        return {}
    with scratch_folder() as folder:
        try:
            _tokenizer_class(path, config).from_pretrained(path.parent, gguf_file=path.name) \
                .save_pretrained(folder)
            complete_tokenizer(header, folder)
        except Exception as error:  # transformers raises many kinds for what it does not know
            raise LlmcError(f"transformers cannot convert the tokenizer of '{path}' "
                            f"('{_TOKENIZER}' is '{kind}'; {_line(error)}); give the model's "
                            f"Hugging Face directory") from error
        return {str(file.relative_to(folder)): file.read_bytes()
                for file in folder.rglob("*") if file.is_file()}


def _read_config(path: Path, header: GgufHeader) -> Any:
    """The transformers config, from a copy of the file without vocabulary and tensors where the
    size of the vocabulary is all that a config takes of it.
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
    except Exception as error:  # gguf and transformers raise many kinds for a bad file
        if f"architecture {architecture} is not supported" in str(error):
            raise LlmcError(f"'{path}' has a model of architecture '{architecture}', which "
                            f"transformers does not read from GGUF files; give the model's Hugging "
                            f"Face directory") from error
        raise LlmcError(f"'{path}' cannot be read as GGUF ({_line(error)})") from error


def _line(error: Exception) -> str:
    return shortened(str(error), MAX_REASON) or repr(error)


def _tokenizer_class(path: Path, config: Any) -> Any:
    """The class that AutoTokenizer chooses after it has read the whole config once more."""
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING, TokenizersBackend

    chosen = TOKENIZER_MAPPING.get(type(config), TokenizersBackend)
    said = getattr(config, "tokenizer_class", None) \
        or (path.parent / "tokenizer_config.json").is_file()
    if said or chosen is None or chosen.__name__ == "MistralCommonBackend":
        return AutoTokenizer
    return chosen


def _tensors(path: Path, header: GgufHeader, config: Any) -> dict[str, Weight]:
    """Every tensor by its Hugging Face name, unread.

    Raises:
        LlmcError: one has none, or is laid out in a way that is not known.
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
    except Exception as error:  # of sizes or tokens that contradict one another
        raise LlmcError(f"transformers makes no '{type(config).__name__}' of what '{path}' says of "
                        f"itself ({_line(error)}); give another file") from error
    names = get_gguf_hf_weights_map(model, processor)
    found: dict[str, Weight] = {}
    for tensor in header.tensors:
        weight = _weight(path, tensor)
        if tensor.name in names:
            found[names[tensor.name]] = _processed(weight, tensor.name, processor, names, path)
        elif tensor.name != _ROPE_FACTORS:  # which _scale_rope has read
            raise LlmcError(f"'{path}' has a tensor '{tensor.name}' {list(tensor.shape)} "
                            f"{tensor.kind.name}, for which '{type(config).__name__}' has no "
                            f"place; give the model's Hugging Face directory")
    return found


def _scale_rope(path: Path, header: GgufHeader, config: Any) -> None:
    """Tell the config of what the file says of a scaled rope and transformers does not read.

    Raises:
        LlmcError: it is scaled otherwise than Llama 3's.
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
    """By what Llama 3 divides its frequencies, `[dim / 2]`: one for short wavelengths, `factor` for
    long ones, and something between the two.
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
    if len(tensor.shape) == 1:  # blocks run across rows of one element
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
    """Rows of axis 0, float32: whole runs of blocks."""
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    stop = rows if stop is None else stop
    data = read_rows(path, tensor.offset, (rows, tensor.nbytes // rows), np.dtype(np.uint8), start,
                     stop)
    try:
        values = dequantize(data, GGMLQuantizationType(tensor.kind))
    except NotImplementedError as error:
        raise LlmcError(f"tensor '{tensor.name}' in '{path}' is quantised as {tensor.kind.name}, "
                        f"which gguf cannot read; give another quantisation") from error
    return values.reshape((-1, *tensor.shape[1:]))


def _processed(weight: Weight, name: str, processor: Any, names: Mapping[str, str], path: Path) -> \
        Weight:
    """What transformers makes of a tensor when it reads it, row by row.

    Raises:
        LlmcError: it makes of several tensors one, or the like.
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
        if len(weight.shape) > 1:  # norms are what they change
            probe = np.arange(weight.shape[1], dtype=np.float32)[None]
            if np.array_equal(process(probe), probe):
                return weight
        return Weight(weight.shape, np.float32,
                      lambda start, stop: process(weight.rows(start, stop)), name)
    if kind == "LlamaTensorProcessor":  # queries and keys have their rows in another order
        try:
            rows = process(np.arange(weight.shape[0]))
        except ValueError as error:
            raise LlmcError(f"tensor '{name}' {list(weight.shape)} in '{path}' has rows for other "
                            f"heads than its metadata says; the file is damaged") from error
        return weight.take_rows(rows)
    if kind == "GPT2TensorProcessor":
        turned = len(weight.shape) == 2 and process(np.zeros((1, 2), np.float32)).shape == (2, 1)
        return weight.transpose() if turned else weight
    raise LlmcError(f"'{path}': llmc does not read how GGUF files lay out weights of this "
                    f"architecture ({kind}); give its Hugging Face directory")
