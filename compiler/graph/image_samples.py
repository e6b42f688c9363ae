"""Inputs of an image encoder's graph for images of several sizes, with which passes probe it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

Size = int | str
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}
_FUNCTIONS: Mapping[str, Callable[..., int]] = {"Max": max, "Min": min}


@dataclass(frozen=True)
class ImageSample:
    """Inputs of the graph for one image.

    Args:
        arrays: by name. Values of pixels are arbitrary.
        sizes: of the dynamic axes, by their names in the graph.
        num_rows: of the prompt, the first that the encoder gives; None: all that it gives.
    """

    arrays: Mapping[str, np.ndarray]
    sizes: Mapping[str, int]
    num_rows: int | None = None

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray], inputs: Sequence[gs.Tensor]) -> ImageSample:
        """Describe a graph's inputs."""
        return ImageSample(arrays, {
            str(name): size for tensor in inputs
            for name, size in zip(tensor.shape, arrays[tensor.name].shape, strict=True)
            if not isinstance(name, int)})

    def size(self, name: Size) -> int | None:
        """Evaluate an axis of a tensor, such as `(s4//4)`; None if it is not known."""
        try:
            return name if isinstance(name, int) else \
                self._evaluate(ast.parse(str(name), mode="eval").body)
        except (SyntaxError, KeyError, ZeroDivisionError, TypeError):
            return None

    def shape(self, tensor: gs.Tensor) -> tuple[int, ...] | None:
        """Evaluate a tensor's shape; None if it is not known."""
        if tensor.shape is None:
            return None
        sizes = [self.size(name) for name in tensor.shape]
        known = tuple(size for size in sizes if size is not None)
        return known if len(known) == len(sizes) else None

    def _evaluate(self, node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return self.sizes[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._evaluate(node.operand)
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](self._evaluate(node.left), self._evaluate(node.right))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return _FUNCTIONS[node.func.id](*map(self._evaluate, node.args))
        raise KeyError(ast.dump(node))


def settle_sizes(graph: gs.Graph, samples: Sequence[ImageSample]) -> int:
    """Replace sizes that are equal for all images by their number.

    The exporter gives the width of some tensors as an expression of the number of patches. Sizes of
    inputs are left as they are.

    Returns:
        The number of sizes replaced.
    """
    known: dict[str, Size] = {}
    count = 0
    given = {id(tensor) for tensor in graph.inputs}
    for tensor in graph.tensors().values():
        if id(tensor) in given or isinstance(tensor, gs.Constant) or tensor.shape is None:
            continue
        settled = [known.setdefault(str(name), _settled(name, samples)) if name is not None
                   and not isinstance(name, int) else name for name in tensor.shape]
        count += sum(own != name for own, name in zip(settled, tensor.shape, strict=True))
        tensor.shape = settled
    return count


def _settled(name: str, samples: Sequence[ImageSample]) -> Size:
    sizes = {sample.size(name) for sample in samples}
    size = sizes.pop() if len(sizes) == 1 else None
    return name if size is None else size


def product(sizes: Sequence[Size]) -> Size:
    """The product of sizes, as an expression if any has a name."""
    result: Size = 1
    for size in sizes:
        if isinstance(result, int) and isinstance(size, int):
            result *= size
        else:
            result = size if result == 1 else result if size == 1 else f"({result})*({size})"
    return result
