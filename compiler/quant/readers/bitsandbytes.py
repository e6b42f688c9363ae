"""bitsandbytes.

    LLM.int8  weight int8 [out, in] with SCB [out], 127 times the scales
    NF4, FP4  weight uint8 [out · in / 2, 1]: codes of 4 bits, the first in the high bits, that
              index a quant_map [16]; each block of the flat weight has an absmax. With double
              quantization absmax has codes of a nested_quant_map, scales and an offset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant.readers import Mark, Reader
from llmc.compiler.quant.readers.decoder import Decoder
from llmc.compiler.quant.readers.words import int8_codes
from llmc.compiler.quant.stored import Stored
from llmc.errors import LlmcError

_QUANT_STATE = re.compile(r"\.weight\.quant_state\.bitsandbytes__(nf4|fp4)$")


def read(decoder: Decoder, config: Mapping[str, Any]) -> bool:
    """Make the quantized weights, of 8 bits exactly, of 4 bits dequantized."""
    states = [name for name in decoder.left if _QUANT_STATE.search(name)]
    for name in states:
        _read_4_bits(decoder, _QUANT_STATE.sub("", name), decoder.left.pop(name))
    eight = any(name.endswith(".SCB") for name in decoder.left)
    if not states and not eight:  # raises: no quantized tensors
        decoder.modules("SCB" if config.get("load_in_8bit") else "quant_state.bitsandbytes__nf4")
    for module in decoder.modules("SCB") if eight else ():
        rows, width = (*decoder.shape_of(f"{module}.weight"), 0, 0)[:2]
        tensor = decoder.take(f"{module}.weight", (rows, width), "i")
        form = decoder.left.pop(f"{module}.weight_format", None)
        if form is not None and form.load().any():
            raise LlmcError(f"'{module}' in '{decoder.origin}' is stored in a layout for GPUs "
                            f"before Hopper; llmc reads the row-major one: save the checkpoint "
                            f"again with a newer bitsandbytes")
        largest = decoder.take(f"{module}.SCB", (rows,), "fV").load().astype(np.float32)
        _check_finite(decoder, f"{module}.SCB", largest)
        scales = np.where(largest == 0, 1, largest) * np.float32(1 / 127)
        decoder.keep(module, Stored("int8", int8_codes(tensor), Weight.of(scales[:, None])))
    return True


def _read_4_bits(decoder: Decoder, module: str, state_tensor: Weight) -> None:
    """Make a weight in NF4 or FP4: blocks of the flat weight, with a table of 16 values."""
    name = f"{module}.weight"
    try:
        state = json.loads(state_tensor.load().tobytes())
        rows, width = map(int, state["shape"])
        size, nested = int(state["blocksize"]), int(state.get("nested_blocksize", 0))
        offset, kind = np.float32(state.get("nested_offset", 0)), str(state["quant_type"]).upper()
        if min(rows, width, size) < 1 or nested < 0:
            raise ValueError(f"its sizes are {[rows, width, size, nested]}")
    except (ValueError, KeyError, TypeError) as error:
        raise LlmcError(f"'{state_tensor.name}' in '{decoder.origin}' is no state of bitsandbytes: "
                        f"{error}; the checkpoint is damaged") from error
    blocks = -(-rows * width // size)
    packed = decoder.left.pop(name, None)
    if packed is None or packed.nbytes != -(-rows * width // 2):
        raise LlmcError(f"tensor '{name}' in '{decoder.origin}' is "
                        f"{None if packed is None else list(packed.shape)}, its state is of "
                        f"{[rows, width]} values of 4 bits; the checkpoint is damaged")
    table = decoder.take(f"{name}.quant_map", (16,), "f").load().astype(np.float32)
    _check_finite(decoder, f"{name}.quant_map", table, "number")
    absmax = decoder.take(f"{name}.absmax", (blocks,), "u" if nested else "f").load()
    if nested:
        levels = decoder.take(f"{name}.nested_quant_map", (256,), "f").load().astype(np.float32)
        scales = decoder.take(f"{name}.nested_absmax", (-(-blocks // nested),), "f").load()
        absmax = levels[absmax] * scales.astype(np.float32).repeat(nested)[:blocks] + offset
    absmax = absmax.astype(np.float32)
    _check_finite(decoder, f"{name}.absmax", absmax)

    def numbers(start: int, stop: int) -> np.ndarray:
        first, last = start * width, stop * width
        begin, end = first // 2, -(-last // 2)
        if packed.dtype.itemsize == 1 and packed.shape[1:] == (1,):
            some = packed.rows(begin, end)[:, 0]
        else:
            some = packed.load().view(np.uint8).reshape(-1)[begin:end]
        codes = np.stack([some >> 4, some & 15], -1).reshape(-1)[first % 2:][:last - first]
        made: np.ndarray = table[codes] * absmax[np.arange(first, last) // size]
        return made.reshape(stop - start, width)

    decoder.keep_numbers(module, (rows, width), numbers, f"weights are in {kind}, which no kernel "
                         f"reads: they are read as float32, at four to eight times the memory")


def _check_finite(decoder: Decoder, name: str, numbers: np.ndarray, what: str = "scale") -> None:
    if not np.isfinite(numbers).all():
        raise LlmcError(f"'{name}' in '{decoder.origin}' has a {what} that is NaN or infinite; the "
                        f"checkpoint is damaged")


def _describe(config: Mapping[str, Any]) -> str:
    bits = load_bits(config)
    kind = {8: "LLM.int8", 4: str(config.get("bnb_4bit_quant_type", "fp4")).upper()}
    return f"bitsandbytes ({bits[0]} bits, {kind[bits[0]]})" if bits else "bitsandbytes"


def load_bits(config: Mapping[str, Any]) -> list[int]:
    """The bits that a config asks for: 8, 4, both or neither."""
    return [number for number in (8, 4) if config.get(f"load_in_{number}bit")
            or config.get(f"_load_in_{number}bit")]


READER = Reader(
    methods=dict.fromkeys(("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"),
                          "bitsandbytes"),
    read=read, describe=_describe,
    marks=(Mark(r"\.quant_state\.bitsandbytes__(nf4|fp4)|\.weight\.(nested_)?(absmax|quant_map)",
                "bitsandbytes in 4 bits (NF4 or FP4)"),
           Mark(r"\.SCB|\.weight_format", "bitsandbytes in 8 bits (LLM.int8)")))
