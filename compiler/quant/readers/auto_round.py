"""AutoRound: tensors of GPTQ, in the version of its packing_format, or of AWQ.

Its extra_config may give layers other bits and group sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.quant.readers import Reader
from llmc.compiler.quant.readers.awq import read_awq
from llmc.compiler.quant.readers.config import bits_of, layers_of
from llmc.compiler.quant.readers.decoder import Decoder
from llmc.compiler.quant.readers.gptq import read_gptq


def read(decoder: Decoder, config: Mapping[str, Any]) -> bool:
    """Make the quantized weights; False: a scheme is unsupported.

    The second part of packing_format (`auto_round:auto_gptq`) names the tensors' format. It is
    GPTQ's version 1 if absent and the scheme is symmetric.
    """
    for place in (config, *layers_of(config)):
        of_activations, bits = (
            found if isinstance(found := place.get(name), int) else by_default
            for name, by_default in (("act_bits", 16), ("bits", 4)))
        rounds = 0 < of_activations < 16 or (place.get("data_type") or "int") != "int"
        if rounds and bits <= 8:
            return False
    tool, _, packing = str(
        config.get("packing_format") or config.get("backend") or "").partition(":")
    if tool != "auto_round" and config.get("sym", True):
        tool, packing = "auto_round", "auto_gptq"
    packing = packing.partition(":")[0]
    if bits_of(config, "bits") is None or tool != "auto_round" or config.get("rotation_config"):
        return False
    if packing in ("auto_awq", "awq"):
        return read_awq(decoder, {"bits": config.get("bits", 4)})
    if packing not in ("auto_gptq", "gptq", "gptqmodel", ""):
        return False
    read_gptq(decoder, config, zeros_less=int(packing in ("auto_gptq", "gptq")))
    return True


READER = Reader(methods={"auto-round": "AutoRound", "intel/auto-round": "AutoRound"}, read=read)
