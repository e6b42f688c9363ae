"""Per-head matrices from one quantized weight that has the heads' rows one after the other.

    weight    [heads * rows, in]
    matrices  [heads, rows, in], or with `transposed` [heads, in, rows]

ONNX Runtime folds it at load.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.quantization import dequantize, quantizable


def _text(fields: Fields, present: frozenset[str], folds: bool) -> str:
    lines = [dequantize(fields, present, "matrix", folds=folds) if fields["weight_dtype"] else
             "matrix = Identity(weight)",
             f"rows_of_heads = Constant<value_ints=[{fields['heads']}, -1]>()",
             "width = Shape<start=1>(matrix)", "shape = Concat<axis=0>(rows_of_heads, width)"]
    if not fields["transposed"]:
        return "\n".join([*lines, "matrices = Reshape(matrix, shape)"])
    return "\n".join([*lines, "rows = Reshape(matrix, shape)",
                      "matrices = Transpose<perm=[0, 2, 1]>(rows)"])


def _shape(weight: Shape, fields: Fields) -> Shape:
    heads, (rows, columns) = fields["heads"], map(int, weight)
    if heads < 1 or rows % heads:
        raise ValueError(f"HeadMatrices's weight has {rows} rows, not divisible into {heads} heads")
    each = rows // heads
    return (heads, columns, each) if fields["transposed"] else (heads, each, columns)


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    matrix = inputs["weight"].astype(np.float64)
    made = matrix.reshape(fields["heads"], -1, matrix.shape[1])
    return [made.swapaxes(1, 2) if fields["transposed"] else made]


def _samples(rng: np.random.Generator) -> list[Sample]:
    return [Sample({"heads": heads, "transposed": transposed},
                   {"weight": rng.standard_normal((12, 10)).astype(np.float32)})
            for heads, transposed in ((3, 0), (3, 1), (1, 0), (4, 1))]


OP = quantizable(Op(
    name="HeadMatrices",
    version=1,
    inputs=("weight",),
    outputs=("matrices",),
    fields={"heads": 0, "transposed": 0},
    required=("heads",),
    choices={"transposed": (0, 1)},
    shapes=lambda shapes, fields: [_shape(shapes["weight"], fields)],
    dims=lambda fields, present: {"weight": ("rows", "in")},
    body=lambda fields, present: _text(fields, present, False),
    bodies={"cpu": lambda fields, present: _text(fields, present, True)},
    has_core=False,
    reference=_reference,
    samples=_samples,
), rounds=False)
