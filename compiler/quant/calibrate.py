"""Calibrated weight quantization: AWQ's channel scales, then GPTQ's error correction.

The fused graph of the whole model is run on a text, node by node. Before a node runs whose output
is read by a single linear layer, the two are scaled (compiler/quant/channel_scales.py). Before a
linear layer runs, its weight is rounded column by column; the error of a column is compensated by
the columns that follow, according to the layer's inputs (Frantar et al., 2022, without act-order).
Then the layer runs with its quantized weight, so that later layers see, and correct, earlier
errors. Memory holds the text's activations and one weight.

The Hessian (xᵀx) is summed by the processor's BLAS, so unlike round-to-nearest the result is
reproducible on the same machine only.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import EMBED_IDS, EMBEDS
from llmc.compiler.check.execute import run_graph
from llmc.compiler.frontend.raw import RawModel
from llmc.compiler.graph.rewrite import caches, op_of, operands, state_of, values_of
from llmc.compiler.graph.weights import Weight
from llmc.compiler.passes.packing import head_weight, token_table
from llmc.compiler.passes.quantize import is_rounded, refuse_group_size, refuse_rounded, said
from llmc.compiler.quant.channel_scales import find_pair, scale_channels
from llmc.compiler.quant.codes import check_finite, decode, encode, scales_of
from llmc.compiler.quant.nearest import quantize
from llmc.compiler.quant.scheme import Scheme
from llmc.compiler.quant.stored import Stored
from llmc.compiler.scratch import scratch_folder, temporary_files
from llmc.errors import LlmcError
from llmc.plugins.code_types import CODE_TYPES
from llmc.runtime.tokenizer import read_tokenizer

LEAST_TOKENS = 1024
_SEQUENCE, _MOST_TOKENS = 512, 8192
_DAMPING = 0.01  # relative to the mean of the diagonal, as in GPTQ
_BLOCK = 128  # columns whose corrections are applied to the remaining columns at once
# Clipping a group to less than its maximum loses little if few of its values are that large.
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)

Progress = Callable[[str], None]


def read_text(path: str | Path, raw: RawModel) -> list[int]:
    """Tokenize a calibration text.

    Returns:
        At least `LEAST_TOKENS` token ids.

    Raises:
        LlmcError: the file cannot be read or is too short, or the model has no tokenizer.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LlmcError(f"'{path}' cannot be read as UTF-8 text ({error})") from error
    with scratch_folder() as folder:
        raw.save_tokenizer(folder)
        if not (folder / "tokenizer.json").is_file():
            raise LlmcError("the model has no tokenizer, which --calibrate needs; put a "
                            "tokenizer.json beside its config.json")
        tokens: list[int] = read_tokenizer(folder).encode(text).ids
    if len(tokens) < LEAST_TOKENS:
        raise LlmcError(f"'{path}' has {len(tokens)} tokens, and calibration needs "
                        f"{LEAST_TOKENS}; give a longer text")
    return tokens[:_MOST_TOKENS]


def calibrate(graph: gs.Graph, tokens: Sequence[int], scheme: Scheme, head_scheme: Scheme | None,
              max_seq_len: int, progress: Progress = lambda text: None) -> None:
    """Quantize the weights of linear layers.

    Args:
        graph: fused, of the whole model, before partitioning.
        tokens: of the calibration text.
        scheme: of linear layers.
        head_scheme: of the LM head; None: not quantized.
        max_seq_len: positions of a sequence.
        progress: called with the name of each layer.

    Raises:
        LlmcError: a weight cannot be quantized by its scheme.
    """
    head = head_weight(graph)
    constants = [tensor for tensor in graph.tensors().values() if isinstance(tensor, gs.Constant)]

    def wanted(tensor: gs.Tensor) -> Scheme | None:
        return head_scheme if values_of(tensor) is values_of(head) else scheme

    refuse_group_size([graph], scheme, head_scheme, 1)
    values: dict[str, np.ndarray] = _feeds(graph, tokens, max_seq_len)
    last_use = {id(tensor): step for step, node in enumerate(graph.nodes)
                for tensor in node.inputs}
    file = _WeightFile()
    for step, node in enumerate(graph.nodes):
        pair = find_pair(graph, node)
        if pair is not None:
            weight_scheme = wanted(pair.weight)
            if weight_scheme is not None:
                scale_channels(pair, _run(node, values)[pair.made.name], weight_scheme)
        op = op_of(node)
        if op is not None and len(op.quantized) == 1 and is_rounded(node):
            tensor = operands(node)[op.quantized[0].weight]
            weight = values_of(tensor)
            weight_scheme = wanted(tensor)
            if weight_scheme is not None:
                refuse_rounded(weight)
                progress(f"calibrate {tensor.name}")
                stored = file.keep(_round(weight, values[operands(node)["x"].name], weight_scheme,
                                          said(weight, tensor.name)))
                for constant in constants:
                    if constant._values is weight:
                        constant._values = stored.weight(weight.name)
                        constant._values.origin = weight.origin
        if any(t.name == "logits" for t in node.outputs):
            return  # only the head computes logits; nothing follows it
        values.update(_run(node, values))
        for tensor in (*node.inputs, *node.outputs):
            if last_use.get(id(tensor), -1) <= step:
                values.pop(tensor.name, None)


def _feeds(graph: gs.Graph, tokens: Sequence[int], max_seq_len: int) -> dict[str, np.ndarray]:
    """Graph inputs for the text, cut into sequences."""
    length = min(_SEQUENCE, max_seq_len)
    count = len(tokens) // length
    total = count * length
    feeds: dict[str, np.ndarray] = {
        "input_ids": np.array(tokens[:total], np.int64),
        "position_ids": np.tile(np.arange(length, dtype=np.int64), count),
        "cu_seqlens": np.arange(0, total + 1, length, dtype=np.int32),
        "past_lens": np.zeros(count, np.int32),
        "commit_lens": np.full(count, length, np.int32),
        "logits_indices": np.arange(total, dtype=np.int64)}
    feeds[EMBED_IDS] = np.full(total, -1, np.int32)
    feeds[EMBEDS] = np.zeros((1, token_table(graph).shape[1]), np.float32)
    empty = functools.cache(lambda shape: np.zeros(shape, np.float32))  # one for all layers
    for node in graph.nodes:
        for cache, _ in caches(node):
            feeds[cache.name] = empty((count, cache.shape[1], length, cache.shape[3]))
        state = state_of(node)
        if state is not None:
            feeds[state[0].name] = empty((count, *state[0].shape[1:]))
    return feeds


def _run(node: gs.Node, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs of a node, without caches and states that no other node reads."""
    kept = {id(cache) for pair in [*caches(node), state_of(node) or ()] for cache in pair}
    given: dict[int, gs.Tensor] = {}
    for t in node.inputs:
        if isinstance(t, gs.Constant):
            given[id(t)] = gs.Constant(t.name, t._values)
        elif not t.is_empty():
            known = values[t.name]  # exported tensors may lack dtype and shape
            given[id(t)] = gs.Variable(t.name, known.dtype, [f"{t.name}.{axis}" for axis in
                                                             range(known.ndim)])
    outputs = [t if t.is_empty() else gs.Variable(t.name, t.dtype) for t in node.outputs]
    names = [t.name for t, own in zip(node.outputs, outputs, strict=True)
             if (id(t) not in kept or t.outputs) and not own.is_empty()]
    copy = gs.Node(op=node.op, name=node.name, domain=node.domain, attrs=dict(node.attrs),
                   inputs=[given.get(id(t), gs.Variable.empty()) for t in node.inputs],
                   outputs=outputs)
    inputs = [tensor for tensor in given.values() if isinstance(tensor, gs.Variable)]
    return run_graph(gs.Graph(nodes=[copy], inputs=inputs, outputs=outputs), values, names)


class _WeightFile:
    """A temporary file of quantized weights, deleted with the last of them."""

    def __init__(self) -> None:
        with temporary_files():
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._end = 0

    def keep(self, stored: Stored) -> Stored:
        """The same weight, read from the file."""
        return replace(stored, codes=self._kept(stored.codes), scales=self._kept(stored.scales),
                       zeros=stored.zeros and self._kept(stored.zeros))

    def _kept(self, weight: Weight) -> Weight:
        start, dtype = self._end, weight.dtype
        width = weight.shape[1] * dtype.itemsize
        with temporary_files():
            for block in weight.blocks():
                self._file.write(block.tobytes())
            self._file.flush()
        self._end += weight.nbytes

        def rows(first: int, stop: int) -> np.ndarray:
            # Refers to nothing of `weight`, which this function would keep in memory.
            data = os.pread(self._file.fileno(), (stop - first) * width, start + first * width)
            return np.frombuffer(data, dtype).reshape(stop - first, -1)

        return Weight(weight.shape, dtype, rows, weight.name)


def _round(weight: Weight, x: np.ndarray, scheme: Scheme, name: str) -> Stored:
    """Quantize a weight [out, in] for inputs x [num_tokens, in]."""
    size = quantize(weight, scheme, name).group_size  # raises if it does not divide the row
    matrix = weight.load().astype(np.float32)
    check_finite(matrix.reshape(len(matrix), -1, size), scheme.dtype, name)
    importance = _products(x)
    factors = _corrections(importance)
    weights = np.diag(importance).astype(np.float32)
    rows, width = matrix.shape
    codes = np.empty((rows, width), np.uint8)
    scales, zeros = (np.empty((rows, width // size), np.float32) for _ in range(2))
    block = max(_BLOCK // size, 1) * size
    for start in range(0, width, block):
        stop = min(start + block, width)
        errors = np.empty((rows, stop - start), np.float32)
        for column in range(start, stop):
            group = column // size
            if column % size == 0:
                own = slice(column, column + size)
                scales[:, group], zeros[:, group] = _search(matrix[:, own], weights[own],
                                                            scheme.dtype)
            scale, zero = scales[:, group], zeros[:, group]
            codes[:, column] = encode(matrix[:, column, None], scale, zero, scheme.dtype)[:, 0]
            numbers = decode(codes[:, column, None], scale, zero, scheme.dtype)[:, 0]
            error = (matrix[:, column] - numbers) / factors[column, column]
            matrix[:, column + 1:stop] -= np.outer(error, factors[column, column + 1:stop])
            errors[:, column - start] = error
        matrix[:, stop:] -= errors @ factors[start:stop, stop:]
    has_zeros = CODE_TYPES[scheme.dtype].zero_point is None
    return Stored(scheme.dtype, Weight.of(codes, name), Weight.of(scales, name),
                  Weight.of(zeros.astype(np.uint8), name) if has_zeros else None,
                  activation_dtype=scheme.activation_dtype)


def _products(x: np.ndarray) -> np.ndarray:
    """The damped Hessian xᵀx, float64 [in, in]; columns that are always 0 have damping alone."""
    flat = x.reshape(-1, x.shape[-1]).astype(np.float64)
    products: np.ndarray = flat.T @ flat
    products[np.diag_indices_from(products)] += _DAMPING * max(np.diag(products).mean(), 1e-8)
    return products


def _corrections(products: np.ndarray) -> np.ndarray:
    """The upper Cholesky factor of the inverse: row i corrects the columns after i."""
    factors: np.ndarray = np.linalg.cholesky(np.linalg.inv(products)).T
    return factors.astype(np.float32)


def _search(groups: np.ndarray, weights: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points of groups [rows, size] with the least weighted rounding error.

    `weights` [size] are those of a column's squared error.
    """
    best = np.full(len(groups), np.inf, np.float32)
    chosen = scales_of(groups, dtype)
    for shrink in _SHRINKS if CODE_TYPES[dtype].bits == 4 else _SHRINKS[:1]:
        scales, zeros = scales_of(groups * np.float32(shrink), dtype)
        numbers = decode(encode(groups, scales, zeros, dtype), scales, zeros, dtype)
        loss = ((groups - numbers) ** 2 * weights).sum(-1)
        better = loss < best
        best = np.where(better, loss, best)
        chosen = np.where(better, scales, chosen[0]), np.where(better, zeros, chosen[1])
    return chosen
