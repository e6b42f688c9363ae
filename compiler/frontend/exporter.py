"""A faster path through torch's ONNX exporter.

torch.onnx.export captures a model, runs it twice more (to decompose ops without an ONNX function,
and to make type promotion explicit), and translates it with a registry of functions that it
rebuilds each time. Here only the functions that a model needs are looked up. The captured graph is
translated directly if each op has a function, or is rewritten by `_simplify`: copies, casts, mixed
dtypes, in-place ops on memory that no other value shares, writes to slices of a new tensor. Any
other model takes torch's path, which takes five times as long.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18, version_converter
from onnxscript.function_libs.torch_lib.tensor_typing import TReal
from onnxscript.values import Opset, TracedOnnxFunction
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes
from torch.onnx._internal.exporter import _core, _flags, _ir_passes, _registration
from torch.onnx._internal.exporter._torchlib import _torchlib_registry
from torch.onnx._internal.fx.passes import type_promotion

from llmc.errors import LlmcError

OPSET = 23
_CASTS = frozenset({"aten::to.dtype", "aten::to.dtype_layout", "aten::to.device"})
_COPIES = frozenset({"aten::alias", "aten::clone", "aten::contiguous", "aten::detach",
                     "aten::detach_", "aten::lift_fresh_copy"})
_ASSERTIONS = frozenset({"aten::_assert_scalar", "aten::_assert_tensor_metadata",
                         "aten::_assert_async", "aten::sym_constrain_range_for_size"})
_SYNONYMS = {"aten::max.other": torch.ops.aten.maximum.default,
             "aten::min.other": torch.ops.aten.minimum.default,
             "aten::reshape": torch.ops.aten.view.default}
_IN_PLACE = {f"aten::{name}_.Tensor": getattr(torch.ops.aten, name).Tensor
             for name in ("add", "sub", "mul", "div")} \
    | {"aten::scatter_.src": torch.ops.aten.scatter.src,
       "aten::scatter_.value": torch.ops.aten.scatter.value}
# Views that may be written to, and the op that writes functionally.
_SCATTERS = {"aten::select.int": torch.ops.aten.select_scatter.default,
             "aten::slice.Tensor": torch.ops.aten.slice_scatter.default}
# Ops by their replacement and its arguments.
_REWRITTEN: Mapping[str, tuple[Any, Callable[[torch.fx.Node], tuple[Any, ...]]]] = {
    "aten::square": (torch.ops.aten.pow.Tensor_Scalar, lambda source: (source, 2)),
    "aten::numpy_T": (torch.ops.aten.permute.default,
                      lambda source: (source, list(range(source.meta["val"].dim()))[::-1]))}


def export_onnx(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor],
                dynamic_shapes: Sequence[Any], outputs: Sequence[str],
                longest: int = 0) -> ir.Model:
    """Export a module as an unoptimized ONNX model of opset `OPSET`.

    Args:
        module: the module.
        inputs: example inputs by name, in order of the module's arguments.
        dynamic_shapes: for each argument, its dynamic axes; a tuple of them for *args.
        outputs: names.
        longest: size up to which dynamic axes must work.

    Raises:
        LlmcError: a dynamic axis does not work from 1 to `longest`.
        Exception: any error of the module's code or the exporter.
    """
    with torch.no_grad():  # otherwise a no_grad block inside becomes a submodule
        program = _capture(module, tuple(inputs.values()), tuple(dynamic_shapes), longest)
    if _is_plain(program.graph_module.graph):
        _simplify(program.graph_module)
        registry = _registry_of({name for _, name in _calls(program.graph_module.graph)})
    else:
        registry = _whole_registry()
        program = _core._prepare_exported_program_for_export(program, registry=registry)
    converted = _core._exported_program_to_onnx_program(program, registry=registry)
    model: ir.Model = converted.model
    version_converter.convert_version(model, OPSET)  # also inlines functions
    _ir_passes.rename_inputs(model, list(inputs))
    _ir_passes.rename_outputs(model, list(outputs))
    converted._rename_dynamic_axes(tuple(dynamic_shapes))
    return model


@_flags.set_onnx_exporting_flag  # type: ignore[untyped-decorator]  # torch's
def _capture(module: torch.nn.Module, args: tuple[torch.Tensor, ...],
             dynamic_shapes: tuple[Any, ...], longest: int) -> \
        torch.export.ExportedProgram:
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        export = functools.partial(torch.export.export, module, args, strict=False,
                                   prefer_deferred_runtime_asserts_over_guards=True)
        try:
            return export(dynamic_shapes=dynamic_shapes)
        except torch._dynamo.exc.UserError as error:
            bounded = _bounded(dynamic_shapes, error.msg, longest)
            if bounded is None:
                raise
        return export(dynamic_shapes=bounded)


def _bounded(dynamic_shapes: tuple[Any, ...], message: str, longest: int) -> \
        tuple[Any, ...] | None:
    """Apply the bounds that torch suggests for dynamic axes, such as the rows of a table.

    Returns:
        The bounded shapes; None if torch suggests something else, such as a fixed size.
    """
    try:
        refined = refine_dynamic_shapes_from_suggested_fixes(message, dynamic_shapes)
    except Exception:
        return None
    if not all(isinstance(axes, Mapping) for axes in dynamic_shapes):
        return None
    dims = [dim for axes in refined for dim in axes.values()]
    named = {dim.__name__ for axes in dynamic_shapes for dim in axes.values()}
    if not all(type(dim) is torch.export.Dim and dim.__name__ in named for dim in dims):
        return None
    for dim in dims:
        if dim.max < longest:
            raise LlmcError(f"its code supports at most {dim.max} in axis '{dim.__name__}', its "
                            f"config requires {longest}; correct the config")
        if dim.min > 1:
            raise LlmcError(f"its code needs at least {dim.min} in axis '{dim.__name__}', "
                            f"expected 1")
    return tuple(refined)


def _unsqueeze(self: TReal, dim: int) -> TReal:
    """Unsqueeze a complex tensor: its last axis has the real and imaginary parts."""
    return opset18.Unsqueeze(self, opset18.Constant(value_ints=[dim if dim >= 0 else dim - 1]))


# Functions on complex tensors that torch's library lacks.
_COMPLEX = {torch.ops.aten.unsqueeze.default: _unsqueeze}


@functools.cache
def _whole_registry() -> _registration.ONNXRegistry:
    registry = _registration.ONNXRegistry.from_torchlib(opset_version=OPSET)
    _register_complex(registry)
    return registry


def _register_complex(registry: _registration.ONNXRegistry) -> None:
    for target, function in _COMPLEX.items():
        registry._register(target, _registration.OnnxDecompMeta(
            onnx_function=TracedOnnxFunction(Opset("llmc", 1), function), fx_target=target,
            signature=None, is_complex=True))


@functools.cache
def _library() -> Mapping[str, Any]:
    """Return onnxscript's functions by names of torch ops, unparsed."""
    from onnxscript.function_libs.torch_lib import ops, registration
    del ops  # its import fills the registry
    return dict(registration.default_registry.items())


@functools.cache
def _torch_functions() -> tuple[_registration.OnnxDecompMeta, ...]:
    """Return the functions that torch itself brings."""
    return tuple(_torchlib_registry.get_torchlib_ops())


@functools.cache
def _torch_names() -> frozenset[str]:
    return frozenset(_name(meta.fx_target) for meta in _torch_functions())


def _registry_of(names: Set[str]) -> _registration.ONNXRegistry:
    """Build a registry for these ops only: parsing all takes longer than an export."""
    registry = _registration.ONNXRegistry()
    registry._opset_version = OPSET
    for meta in _torch_functions():
        registry._register(meta.fx_target, meta)
    for name in names & _library().keys():
        target = _registration._get_overload(name)
        for is_complex, functions in ((False, _library()[name].overloads),
                                      (True, _library()[name].complex)):
            for function in functions:
                registry._register(target, _registration.OnnxDecompMeta(
                    onnx_function=function, fx_target=target, signature=None,
                    is_complex=is_complex))
    _register_complex(registry)
    registry._cleanup_registry_based_on_opset_version()
    return registry


@functools.cache
def _promotions() -> type_promotion.TypePromotionTable:
    return type_promotion.TypePromotionTable()


def _calls(graph: torch.fx.Graph) -> Iterator[tuple[torch.fx.Node, str]]:
    """Yield the nodes that call a function, and its name in the library."""
    for node in graph.nodes:
        if node.op == "call_function":
            yield node, _name(node.target)


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target.name())
    return f"{getattr(target, '__module__', '')}::{getattr(target, '__name__', '')}"


def _is_plain(graph: torch.fx.Graph) -> bool:
    """Whether the graph can be translated after `_simplify`."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    return not any(node.op == "get_attr" for node in graph.nodes) and all(
        name in _CASTS or name in _ASSERTIONS or name in _SYNONYMS or name in _REWRITTEN
        or _is_copy(node, name) or _is_written_alone(node, name)
        or _is_written_through_views(node, name, order)
        or (_has_function(node, name) and not _writes(node) and _promoted(node) is not None)
        for node, name in _calls(graph))


def _has_function(node: torch.fx.Node, name: str) -> bool:
    """Whether there is a function for an op on real tensors, or on complex ones if it has some."""
    function = _library().get(name)
    if any(map(_is_complex, node.all_input_nodes)):
        return node.target in _COMPLEX or bool(function is not None and function.complex)
    return bool(function is not None and function.overloads) or name in _torch_names()


def _is_complex(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _is_copy(node: torch.fx.Node, name: str) -> bool:
    """Whether the result equals the first argument."""
    if name in _CASTS:
        source: Any = node.args[0]
        return bool(source.meta["val"].dtype == node.meta["val"].dtype)
    return name in _COPIES or (name == "aten::dropout" and node.args[2] is False) \
        or (name == "aten::slice.Tensor" and _takes_all(*node.args[2:])) \
        or (name == "aten::mul.Tensor" and node.args[1] == 1 and _is_complex(node))


def _takes_all(start: object = None, end: object = None, step: object = 1) -> bool:
    """Whether a slice selects the whole axis, for any size."""
    return start in (None, 0) and end in (None, sys.maxsize) and step == 1


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_written_alone(node: torch.fx.Node, name: str) -> bool:
    """Whether the op overwrites its first operand, and no other value shares that memory.

    All operands must have the result's dtype.
    """
    if name not in _IN_PLACE:
        return False
    written: Any = node.args[0]
    operands = node.all_input_nodes if name.endswith(".Tensor") else [written]
    dtypes = {getattr(each.meta["val"], "dtype", None) for each in operands}
    return dtypes == {written.meta["val"].dtype} \
        and not any(map(_shares, (written, *written.users)))


def _is_written_through_views(node: torch.fx.Node, name: str,
                              order: Mapping[torch.fx.Node, int]) -> bool:
    """Whether `copy_` writes to a view of a new tensor, whose other views are not used later.

    Args:
        order: the places of the graph's nodes.
    """
    if name != "aten::copy_" or node.users:
        return False
    sources: tuple[Any, ...] = node.args[:2]
    written, value = (source.meta["val"] for source in sources)
    if written.dtype != value.dtype or str(written.shape) != str(value.shape):
        return False
    views = _views(node)
    if not views or any(_is_copy(view, _name(view.target)) for view in views):
        return False
    base: Any = views[-1].args[0]
    return not _shares(base) and not any(
        order[alias] < order[node] < max(order[user] for user in alias.users)
        for alias in _aliases(base) - {*views[1:]} if alias.users)


def _views(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the views through which an op writes to its first argument, that argument first."""
    views = []
    view: Any = node.args[0]
    while _name(view.target) in _SCATTERS:
        views.append(view)
        view = view.args[0]
    return views


def _aliases(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the values that may share memory with a value from which they are computed."""
    found: set[torch.fx.Node] = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if _shares(user) and user not in found:
                found.add(user)
                pending.append(user)
    return found


def _shares(node: torch.fx.Node) -> bool:
    """Whether the result may share memory with another value, also after copies are removed.

    The result of an in-place op is excluded, as it replaces its argument in later uses.
    """
    name = _name(node.target)
    if name in _IN_PLACE or node.op == "output":
        return False
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return _shares(source)
    if not isinstance(node.target, torch._ops.OpOverload):
        return bool(node.op != "call_function")
    return _is_copy(node, name) or (name not in _CASTS and any(
        each.alias_info is not None for each in node.target._schema.returns))


def _promoted(node: torch.fx.Node) -> dict[int, torch.dtype] | None:
    """Return the target dtype of each argument that is promoted; None if one is not a tensor."""
    rule = type_promotion.get_type_promotion_rule(node, _promotions())
    if rule is None:
        return {}
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    promoted = rule.preview_type_promotion(args, kwargs)
    if not all(dtype is None or _has_dtype(kwargs[name], dtype)
               for name, dtype in promoted.kwargs_dtypes.items()):
        return None
    others = {index: dtype for index, dtype in promoted.args_dtypes.items()
              if dtype is not None and not _has_dtype(args[index], dtype)}
    return others if all(isinstance(args[index], torch.Tensor) for index in others) else None


def _has_dtype(arg: object, dtype: torch.dtype) -> bool:
    """Whether a tensor, or each of a list, has the dtype.

    A Python scalar has it if the dtype can represent it.
    """
    if isinstance(arg, list | tuple):
        return all(_has_dtype(each, dtype) for each in arg)
    if isinstance(arg, torch.Tensor):
        return bool(arg.dtype == dtype)
    return isinstance(arg, int | float) and (dtype.is_floating_point or isinstance(arg, int))


def _simplify(module: torch.fx.GraphModule) -> None:
    """Remove assertions and copies, and rewrite ops to those that the library and passes know."""
    for node, name in list(_calls(module.graph)):
        source: Any = node.args[0] if node.args else None
        if name in _ASSERTIONS:
            module.graph.erase_node(node)
        elif _is_copy(node, name):
            if any(user.op == "output" for user in node.users):  # the output needs a node
                node.target, node.args, node.kwargs = torch.ops.aten.clone.default, (source,), {}
            else:
                node.replace_all_uses_with(source)
                module.graph.erase_node(node)
        elif name in _CASTS:
            node.target = torch.ops.aten._to_copy.default
            node.args, node.kwargs = (source,), {"dtype": node.meta["val"].dtype}
        elif name in _SYNONYMS:
            node.target = _SYNONYMS[name]
        elif name == "aten::flatten.using_ints":
            _view(module.graph, node)
        elif name in _REWRITTEN:
            node.target, arguments = _REWRITTEN[name]
            node.args = arguments(source)
        elif name in _IN_PLACE:
            _use_later(module.graph, node, node.args[0], node)
            node.target = _IN_PLACE[name]
        elif name == "aten::copy_":
            _scatter(module.graph, node)
        else:
            for index, dtype in (_promoted(node) or {}).items():
                _cast(module.graph, node, index, dtype)
    module.graph.eliminate_dead_code()
    module.recompile()


def _use_later(graph: torch.fx.Graph, node: torch.fx.Node, written: Any,
               result: torch.fx.Node) -> None:
    """Use `result` instead of `written` in all nodes after `node`."""
    later = itertools.takewhile(lambda other: other is not node, reversed(graph.nodes))
    for user in list(later):
        user.replace_input_with(written, result)


def _scatter(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Compute the tensor whose view `copy_` writes to, and use that, and views of it, later."""
    views = _views(node)
    result: Any = node.args[1]

    def call(target: Any, *args: Any, like: torch.fx.Node) -> torch.fx.Node:
        with graph.inserting_before(node):
            made = graph.call_function(target, args)
        made.meta = {**node.meta, "val": like.meta["val"]}
        return made

    for view in views:
        source: Any = view.args[0]
        result = call(_SCATTERS[_name(view.target)], source, result, *view.args[1:], like=source)
    _use_later(graph, node, source, result)
    for view in reversed(views[1:]):
        result = call(view.target, result, *view.args[1:], like=view)
        _use_later(graph, node, view, result)
    graph.erase_node(node)


def _cast(graph: torch.fx.Graph, node: torch.fx.Node, index: int, dtype: torch.dtype) -> None:
    """Cast an argument of an op."""
    argument: Any = node.args[index]
    with graph.inserting_before(node):
        cast = graph.call_function(torch.ops.aten._to_copy.default, (argument,), {"dtype": dtype})
    cast.meta = {**node.meta, "val": argument.meta["val"].to(dtype)}
    node.update_arg(index, cast)


def _view(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Rewrite flatten to view, with dynamic sizes of the graph's inputs."""
    arguments = list(node.args)
    source, start, end = arguments + [0, -1][len(arguments) - 1:]
    shape = source.meta["val"].shape
    start, end = start % len(shape), end % len(shape)
    known = {other.meta["val"].node.expr: other for other, name in _calls(graph)
             if name == "aten::sym_size.int" and other.args[0].op == "placeholder"}
    dims: list[Any] = []
    for axis, size in enumerate(shape):
        if start <= axis <= end:
            dims.extend([-1] * (axis == start))
        else:
            dims.append(size if isinstance(size, int) else known[size.node.expr])
    node.target, node.args = torch.ops.aten.view.default, (source, dims)
