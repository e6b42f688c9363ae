"""NVIDIA ModelOpt.

    FP8    weight in FP8, weight_scale per tensor or row, input_scale
    NVFP4  weight uint8 [out, in / 2], weight_scale; weight_scale_2 is a factor
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.compiler.quant.readers import Reader
from llmc.compiler.quant.readers.decoder import Decoder
from llmc.compiler.quant.readers.eight_bits import ALL, TOKEN, read_float8
from llmc.compiler.quant.readers.fp4 import read_nvfp4


def read(decoder: Decoder, config: Mapping[str, Any]) -> bool:
    """Make the quantized weights; False: the config's algorithm is unsupported."""
    layers = config.get("quantized_layers")
    each = layers if isinstance(layers, Mapping) and layers else {"": config}
    named = {name: str(one.get("quant_algo") if isinstance(one, Mapping) else one)
             for name, one in each.items()}
    by_token, algorithms = "FP8_PER_CHANNEL_PER_TOKEN", {*named.values()}
    if not algorithms <= {"FP8", by_token, "NVFP4"}:
        return False
    for module in decoder.modules("weight_scale"):
        packed = decoder.left.get(f"{module}.weight")
        if f"{module}.weight_scale_2" in decoder.left \
                or (packed is not None and packed.dtype == np.uint8):
            read_nvfp4(decoder, module, "weight", "weight_scale_2", np.multiply)
            continue
        of_rows = math.prod(decoder.shape_of(f"{module}.weight_scale")) > 1
        own = named.get(module, by_token if of_rows and by_token in algorithms else "FP8")
        read_float8(decoder, module, "weight_scale", None, TOKEN if own == by_token else ALL)
    return True


READER = Reader(methods={"modelopt": "NVIDIA ModelOpt"}, read=read,
                config_file="hf_quant_config.json")
