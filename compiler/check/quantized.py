"""The reference of a quantized model: the original with dequantized compiled weights.

A compiled weight has elements of the reference's weights in another order: concatenated rows of
queries, keys and values, a rank's columns, stacked experts. To trace them, the reference is lowered
again with each element's index as its value. Each dequantized value is then scattered to the
element whose index is at its position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import Manifest, WeightForm
from llmc.compiler.check.partition import lower_alike, weight_file
from llmc.compiler.frontend import RawModel
from llmc.compiler.graph.names import SCALED
from llmc.compiler.graph.weights import HeadMatrices, Weight
from llmc.compiler.options import CompileOptions
from llmc.errors import LlmcError
from llmc.plugins.quantization import activations, cpu_activation_block, dequantized

STORED = ("", "_scale", "_zero", "_min")  # suffixes of a quantized weight's tensors
# The index of element e of tensor t is t · 2^40 + 8 · e + 3, exact in float64. A value that was
# scaled or shifted is not 3 modulo 8.
_TENSOR, _STEP, _MARK = 1 << 40, 8, 3

Rows = Callable[[int, int], np.ndarray]


@dataclass(frozen=True)
class OwnWeights:
    """A compiled model's dequantized weights, in the layout of the reference.

    Args:
        arrays: float32 arrays by name of the raw graph's constant.
        forms: storage formats of those that are multiplied by quantized activations.
    """

    arrays: Mapping[str, np.ndarray]
    forms: Mapping[str, WeightForm]

    def put_into(self, graph: gs.Graph) -> None:
        """Replace the weights of a raw graph."""
        for tensor in graph.tensors().values():
            if isinstance(tensor, gs.Constant) and tensor.name in self.arrays:
                tensor._values = Weight.of(self.arrays[tensor.name], tensor.name)


def own_weights(raw: RawModel, manifest: Manifest, root: Path) -> OwnWeights | None:
    """Return a case directory's dequantized weights in the layout of the reference.

    None if a weight of the case directory does not consist of elements of the reference's.
    """
    graph = raw.graph.copy()
    # Norms and biases are not quantized, and passes may read their values in attention and routers.
    sources = _number(graph, matrices=not _has_scaled(root))
    try:
        lowered = lower_alike(replace(raw, graph=graph), manifest, root,
                              CompileOptions(quantize="none"))
    except (LlmcError, AssertionError):  # a pass depends on values
        return None
    arrays: dict[str, np.ndarray] = {}
    forms: dict[str, WeightForm] = {}
    for rank, ranks_graph in enumerate(lowered.graphs):
        chip = manifest.chips[rank]
        known = {tensor.name: tensor._values for tensor in ranks_graph.tensors().values()
                 if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)}
        with weight_file(root, rank) as file:
            names = set(file.keys())
            if not {name.removesuffix(SCALED) for name in chip.quantization} <= known.keys() \
                    or any(name.endswith(".order") for name in names):
                return None
            for name, indices in known.items():
                stored = f"{name}{SCALED}" if f"{name}{SCALED}" in names else name
                form = chip.quantization.get(stored)
                if form is None and stored == name:
                    continue
                parts = {part: file.get_slice(stored + part) for part in STORED
                         if stored + part in names}
                touched = _scatter(indices, _values(parts, form), sources, arrays)
                if touched is None:
                    return None
                if form is not None and _rounds(form, manifest):
                    forms.update(dict.fromkeys(touched, form))
    return OwnWeights(arrays, forms)


def _has_scaled(root: Path) -> bool:
    """Whether calibration has scaled weights, including vectors."""
    with weight_file(root, 0) as file:
        return any(name.endswith(SCALED) for name in [*file.keys()])


def _is_vector(tensor: gs.Constant) -> bool:
    """Whether a weight is of a norm or a bias. Biases of routers have two dimensions."""
    return len(tensor._values.shape) < 2 or tensor.name.endswith("bias")


def _number(graph: gs.Graph, matrices: bool) -> list[tuple[str, Weight]]:
    """Replace every weight by the indices of its elements.

    Args:
        graph: the raw graph.
        matrices: only matrices, not norms and biases.

    Returns:
        Names and weights, by number of the tensor.
    """
    sources: list[tuple[str, Weight]] = []
    indexed: dict[str, Weight] = {}
    for tensor in graph.tensors().values():
        if not (isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)) \
                or (matrices and _is_vector(tensor)):
            continue
        if tensor.name not in indexed:
            sources.append((tensor.name, tensor._values))
            indexed[tensor.name] = _indices(tensor._values, len(sources))
        tensor._values = indexed[tensor.name]
    return sources


def _indices(weight: Weight, tensor: int) -> Weight:
    width = int(np.prod(weight.shape[1:], dtype=np.int64))

    def rows(start: int, stop: int) -> np.ndarray:
        if not weight.shape:
            return np.array(float(tensor * _TENSOR + _MARK))
        elements = np.arange(start * width, stop * width, dtype=np.float64)
        return (tensor * _TENSOR + _STEP * elements + _MARK).reshape(-1, *weight.shape[1:])

    return Weight(weight.shape, np.float64, rows, weight.name)


def _values(parts: Mapping[str, Any], form: WeightForm | None) -> Rows:
    """Return a function that reads rows of a weight from its file, dequantized."""
    def rows(start: int, stop: int) -> np.ndarray:
        block = {part: values[start:stop] for part, values in parts.items()}
        if form is None:
            return np.asarray(block[""], np.float32)
        flat = {part: values.reshape(-1, values.shape[-1]) for part, values in block.items()}
        fields = {"weight_dtype": form.dtype, "group_size": form.group_size}
        return dequantized(fields, flat[""], flat["_scale"], flat.get("_zero"),
                           flat.get("_min")).astype(np.float32)

    return rows


def _scatter(indices: Weight, values: Rows, sources: Sequence[tuple[str, Weight]],
             arrays: dict[str, np.ndarray]) -> set[str] | None:
    """Scatter the values of a compiled weight to the elements that they come from.

    Returns:
        The names of changed weights, or None if an index is invalid.
    """
    matrix = indices.matrix if isinstance(indices, HeadMatrices) else indices
    touched: set[str] = set()
    start = 0
    for block in matrix.blocks():
        stop = start + len(block)
        dense = np.asarray(values(start, stop)).reshape(-1, *block.shape[-1:])
        block = block.reshape(dense.shape[0], -1)
        dense, start = dense[:, :block.shape[1]], stop
        is_element = block != 0  # 0 is padding
        tensors, elements = np.divmod(block[is_element], _TENSOR)
        elements, marks = np.divmod(elements, _STEP)
        if (marks != _MARK).any() or (tensors < 1).any() or (tensors > len(sources)).any():
            return None
        for tensor in np.unique(tensors).astype(int):
            name, weight = sources[tensor - 1]
            if name not in arrays:
                arrays[name] = weight.load().astype(np.float32).copy()
            selected = tensors == tensor
            arrays[name].reshape(-1)[elements[selected].astype(np.int64)] = \
                dense[is_element][selected]
            touched.add(name)
    return touched


def _rounds(form: WeightForm, manifest: Manifest) -> bool:
    """Whether the target quantizes the activations of a weight in this format."""
    return bool(form.activation_dtype) or (
        manifest.target.spec.quantizes_activations
        and cpu_activation_block(form.dtype, form.group_size) > 0)


def round_activations(x: np.ndarray, form: WeightForm, stretch: float = 1.0) -> np.ndarray:
    """Round activations [..., in_features] as the kernel of this format does.

    Args:
        stretch: factor of the scales of int8 activations.
    """
    if form.activation_dtype:
        fields = {"activation_dtype": form.activation_dtype,
                  "activation_scale": form.activation_scale,
                  "activation_group_size": form.activation_group_size}
        return np.asarray(activations(fields, x)).reshape(x.shape)
    block = cpu_activation_block(form.dtype, form.group_size)
    groups = x.reshape(-1, block).astype(np.float32)
    scales = np.maximum(np.abs(groups).max(1, keepdims=True) * np.float32(stretch / 127),
                        np.float32(1e-30))
    return np.asarray(np.rint(groups / scales) * scales).reshape(x.shape)


def put_into_model(model: Any, weights: OwnWeights) -> dict[int, WeightForm] | None:
    """Replace the weights of a transformers model.

    Returns:
        Storage formats that quantize activations, by address of the storage. None if the model has
        no parameter of a weight's name and shape.
    """
    import torch

    parameters = dict(model.named_parameters(remove_duplicate=False))
    forms: dict[int, WeightForm] = {}
    for name, array in weights.arrays.items():
        target = parameters.get(name)
        if target is None:  # of a multimodal model, only the language model is compiled
            target = next((parameter for path, parameter in parameters.items()
                           if path.endswith(f".{name}")
                           or path.replace(".language_model", "") == name
                           or name.endswith(f".{path}")), None)
        if target is None or tuple(target.shape) != array.shape:
            return None
        with torch.no_grad():
            target.copy_(torch.from_numpy(array))
        if name in weights.forms:
            forms[target.untyped_storage().data_ptr()] = weights.forms[name]
    return forms


@contextmanager
def rounded_activations(forms: Mapping[int, WeightForm], stretch: float = 1.0) -> Iterator[None]:
    """Quantize the activations that torch multiplies by weights in these storages.

    Args:
        stretch: see `round_activations`.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    gemms = {torch.nn.functional.linear: (0, 1), torch.addmm: (1, 2), torch.matmul: (0, 1),
             torch.bmm: (0, 1), torch.mm: (0, 1), torch.baddbmm: (1, 2),
             torch.Tensor.matmul: (0, 1), torch.Tensor.__matmul__: (0, 1)}

    class Rounding(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (),
                               kwargs: Any = None) -> Any:
            if function in gemms and len(args) > max(gemms[function]):
                x, weight = gemms[function]
                form = forms.get(args[weight].untyped_storage().data_ptr())
                if form is not None:
                    rounded = round_activations(args[x].detach().float().numpy(), form, stretch)
                    args = [*args[:x], torch.from_numpy(rounded).to(args[x].dtype), *args[x + 1:]]
            return function(*args, **(kwargs or {}))

    with Rounding():
        yield
