"""NumPy interpreter of image encoders' programs, in an arena that tracks the owner of each byte."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from schedule_interpreter import _DTYPES, _ELEMENTWISE, Arena

from llmc import plugins
from llmc.artifacts.program import Program


def with_segments(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs with as many segments in each cu_seqlens; further ones are empty."""
    most = max(len(array) for name, array in inputs.items() if name.startswith("cu_seqlens"))
    return {name: np.pad(array, (0, most - len(array)), mode="edge")
            if name.startswith("cu_seqlens") else array for name, array in inputs.items()}


def run_program(program: Program, weights: Mapping[str, np.ndarray],
                inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run a program; return its outputs in float32.

    Args:
        program: of an image encoder.
        weights: by name.
        inputs: by name.
    """
    given = with_segments(inputs)
    sizes = {name: [len(array) for own, array in given.items() if own.startswith(name)]
             for name in ("patches", "merged_rows")}
    arenas = {False: Arena(program.token_bytes, sizes["patches"][0]),
              True: Arena(program.logit_bytes, (sizes["merged_rows"] or [0])[0])}

    def read(number: int) -> np.ndarray:
        tensor = program.tensors[number]
        if tensor.kind == "input":
            return given[tensor.name].astype(_DTYPES[tensor.dtype])
        if tensor.kind == "weight":
            assert weights[tensor.name].shape == tensor.shape
            return weights[tensor.name]
        if tensor.kind == "columns":
            return read(tensor.of)[:, tensor.first:tensor.first + tensor.width]
        return arenas[tensor.per_logit].read(number, tensor)

    for node in program.nodes:
        arrays = [read(number) if number >= 0 else None for number in node.inputs]
        if node.op == "Gather":
            results = [arrays[0][arrays[1]]]
        elif node.op == "Columns":
            results = [arrays[0][:, arrays[1]]]
        elif node.op == "Concat":
            results = [np.concatenate(arrays, -1)]
        elif node.op in _ELEMENTWISE:
            results = [_ELEMENTWISE[node.op](*(own.astype(np.float32) for own in arrays))]
        else:
            op = plugins.registry()[node.op]
            named = {name: own for name, own in zip(op.input_names, arrays, strict=False)
                     if own is not None}
            op.fit({name: own.shape for name, own in named.items()}, node.fields)
            results = op.reference(op.complete(node.fields), named)
        for number, result in zip(node.outputs, results, strict=True):
            tensor = program.tensors[number]
            arenas[tensor.per_logit].write(number, tensor, result)
    for arena in arenas.values():
        arena.check_guards()
    return [read(number).astype(np.float32) for number in program.outputs]
