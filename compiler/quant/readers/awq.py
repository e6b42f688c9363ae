"""AWQ.

    qweight  int32 [in, out / 8]; eight columns are packed in the order 0 2 4 6 1 3 5 7
    qzeros   int32 [groups, out / 8], packed likewise
    scales   [groups, out]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.compiler.quant.readers import Reader
from llmc.compiler.quant.readers.config import bits_of
from llmc.compiler.quant.readers.decoder import Decoder
from llmc.compiler.quant.readers.gptq import own_config, refuse_changed
from llmc.compiler.quant.readers.groups import with_zeros
from llmc.compiler.quant.readers.words import map_rows, unpack_words

_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # packed positions of columns 0 to 7


def read_awq(decoder: Decoder, config: Mapping[str, Any]) -> bool:
    """Make the quantized weights; False: not in this format."""
    refuse_changed(decoder, config)
    bits = bits_of(config, "bits", "w_bit")
    formats = {str(config.get(key) or "gemm").lower()
               for key in ("version", "format", "checkpoint_format")}
    if bits != 4 or formats != {"gemm"}:
        return False

    def natural(words: np.ndarray) -> np.ndarray:
        codes = unpack_words(words, 4).reshape(len(words), -1, 8)
        return codes[:, :, _AWQ_ORDER].reshape(len(words), -1)

    for module in decoder.modules("qweight"):
        scheme = own_config(decoder, config, module)
        width, words = decoder.matrix(f"{module}.qweight")
        out_features = words * 8
        groups = (*decoder.shape_of(f"{module}.scales"), 1)[0]
        packed = decoder.words(f"{module}.qweight", (width, words))
        codes = map_rows(packed, (width, out_features), np.uint8, natural).transpose()
        scales = decoder.scales(f"{module}.scales", (groups, out_features)).transpose()
        zeros = natural(decoder.words(f"{module}.qzeros", (groups, words)).load())
        if scheme.get("zero_point") is False:
            decoder.check_middle(f"{module}.qzeros", zeros, bits, "zero_point false")
        decoder.check_groups(f"{module}.scales", width, groups)
        decoder.keep(module, with_zeros(4, codes, scales, zeros.T))
    return True


READER = Reader(methods={"awq": "AWQ"}, read=read_awq, config_file="quant_config.json")
