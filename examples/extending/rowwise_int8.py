"""A checkpoint format: weights as int8 with one scale per row.

config.json has `"quantization_config": {"quant_method": "rowwise_int8"}`. A linear layer has the
tensors `NAME.qdata`, int8 [out, in], and `NAME.row_scale`, float32 [out].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.compiler.quant.readers import Reader
from llmc.compiler.quant.readers.decoder import Decoder
from llmc.compiler.quant.stored import Stored


def read(decoder: Decoder, config: Mapping[str, Any]) -> bool:
    """Decode every module that has a `qdata`. True: the checkpoint is read.

    Raises:
        LlmcError: a tensor is missing, or has another shape or dtype.
    """
    for module in decoder.modules("qdata"):
        rows, columns = decoder.matrix(f"{module}.qdata")
        codes = decoder.take(f"{module}.qdata", (rows, columns), "i")
        scales = decoder.scales(f"{module}.row_scale", (rows,))
        # llmc stores int8 codes with an offset of 128. Nothing is read yet.
        unsigned = codes.cast(np.int16).map(lambda block: block + 128).cast(np.uint8)
        decoder.keep(module, Stored("int8", unsigned, scales.reshape((rows, 1))))
    return True


READER = Reader(methods={"rowwise_int8": "row-wise int8"}, read=read)
