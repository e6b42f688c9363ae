"""LoRA adapters: `compile_adapter` for a case directory, `merge_adapter` into a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs

from llmc import __version__
from llmc.artifacts.adapter import ADAPTER_INFO, AdapterInfo, adapter_weights, write_adapter_info
from llmc.artifacts.manifest import (
    MANIFEST_NAME,
    TIED_TABLE,
    Chip,
    LayerRows,
    LoraLayer,
    Manifest,
    hash_file,
    read_manifest,
)
from llmc.artifacts.weight_file import WEIGHTS_NAME, StoredWeight, read_weight_header
from llmc.compiler.artifact import write_weights
from llmc.compiler.expert_adapter import (
    ExpertStack,
    StackedLowRank,
    expert_stacks,
    single_factors,
    stacked_factors,
)
from llmc.compiler.frontend.peft import (
    ExpertFactors,
    LowRank,
    PeftAdapter,
    find_module,
    read_peft,
    read_peft_source,
)
from llmc.compiler.frontend.raw import RawModel
from llmc.compiler.graph.weights import Weight
from llmc.compiler.output import check_output, new_directory
from llmc.errors import LlmcError
from llmc.interrupts import check_interrupted, interruptible
from llmc.memory import memory_errors

_MERGE = "merge it instead: llmc compile MODEL --adapter PEFT_DIR"


@interruptible()
@memory_errors("compile the adapter")
def compile_adapter(peft_dir: str | Path, case_dir: str | Path, output: str | Path) -> AdapterInfo:
    """Compile a PEFT LoRA adapter for a case directory.

    The output is written atomically: the directory of another adapter is replaced only on success.

    Args:
        peft_dir: directory with adapter_config.json and adapter_model.safetensors.
        case_dir: its base, compiled with `enable_lora`.
        output: the directory to write.

    Raises:
        LlmcError: the adapter is invalid, unsupported or of another base, or the case directory
            takes no adapters.
    """
    check_output(output, ADAPTER_INFO)
    case_dir = Path(case_dir)
    manifest = read_manifest(case_dir)
    if not manifest.takes_adapters:
        raise LlmcError(f"'{case_dir}' takes no adapters; compile it again with --enable_lora, or "
                        f"{_MERGE}")
    adapter = read_peft(peft_dir)
    _require_factors(adapter)
    pairs = _pairs_of(adapter, manifest, case_dir)
    with new_directory(output, ADAPTER_INFO) as directory:
        files = []
        for chip in manifest.chips:
            path = directory / adapter_weights(chip.rank)
            path.parent.mkdir()
            entry = write_weights([], path, _chip_weights(chip, pairs, case_dir))[1]
            files.append(entry.model_copy(update={"path": adapter_weights(chip.rank)}))
        info = AdapterInfo(
            format_version=1, llmc_version=__version__,
            base_sha256=hash_file(case_dir / MANIFEST_NAME),
            rank=max(pair.down.shape[0] for pair in pairs.values()), modules=tuple(sorted(pairs)),
            ranks=tuple(pairs[module].down.shape[0] for module in sorted(pairs)),
            source=read_peft_source(peft_dir), files=tuple(files))
        write_adapter_info(info, directory)
        check_interrupted()  # before the output is replaced
        return info


def _require_factors(adapter: PeftAdapter) -> None:
    """Reject what a request cannot bring: anything but factors of layers."""
    if adapter.magnitudes:
        raise LlmcError(f"the adapter in '{adapter.directory}' uses DoRA, which scales the base's "
                        f"weights; {_MERGE}")
    replaced = next((name for name in adapter.saved if name not in adapter.copies), None)
    if replaced is not None:
        raise LlmcError(f"the adapter in '{adapter.directory}' replaces the parameter "
                        f"'{replaced}' of its base (modules_to_save or bias), "
                        f"which requests cannot; {_MERGE}")


def _pairs_of(adapter: PeftAdapter, manifest: Manifest,
              case_dir: Path) -> dict[str, LowRank | StackedLowRank]:
    """Return the adapter's factors by the base's module names.

    Raises:
        LlmcError: the base has no such layer, or one of another shape.
    """
    layers = [layer for chip in manifest.chips for layer in chip.lora]
    sizes = _module_sizes(layer for layer in layers if not layer.experts)
    stacks = expert_stacks(layers)
    given, pairs = {**adapter.modules, **adapter.embeddings}, dict[str, LowRank | StackedLowRank]()
    for factors in adapter.experts:
        if find_module(factors.module, list(sizes)) is not None:  # a matrix, such as a router's
            up, down = factors.stacks(1, "weight")
            given[factors.module] = LowRank(down[0], up[0])
        else:
            name, stack = stacked_factors(adapter, factors, stacks)
            pairs[name] = stack
    unknown = {}
    for name, pair in given.items():
        module = find_module(name, list(sizes))
        if module is None and name in adapter.embeddings and TIED_TABLE in sizes:
            module = TIED_TABLE
        if module is None:
            unknown[name] = pair
            continue
        tall, wide = pair.up.shape[0], pair.down.shape[1]
        if (tall, wide) != sizes[module]:
            raise LlmcError(f"the adapter in '{adapter.directory}' changes '{name}' as a matrix "
                            f"[{tall}, {wide}], in '{case_dir}' it is {list(sizes[module])}; give "
                            f"the adapter's own base")
        pairs[module] = pair
    singles, others = single_factors(adapter, unknown, stacks)
    if others:
        raise LlmcError(f"the adapter in '{adapter.directory}' changes '{others[0]}', which is no "
                        f"layer of '{case_dir}' that takes adapters; give the adapter's own base, "
                        f"or {_MERGE}")
    return {**pairs, **singles}


def _module_sizes(layers: Iterable[LoraLayer]) -> dict[str, tuple[int, int]]:
    """Return out_features and in_features of each module, over all chips."""
    sizes: dict[str, tuple[int, int]] = {}
    for layer in layers:
        wide = 1 + max(max(run.index) for run in layer.columns)
        for run in layer.rows:
            if run.module:
                tall, known = sizes.get(run.module, (0, 0))
                sizes[run.module] = max(tall, 1 + max(run.index)), max(known, wide)
    return sizes


def _chip_weights(chip: Chip, pairs: Mapping[str, LowRank | StackedLowRank],
                  case_dir: Path) -> dict[str, Weight]:
    """Return the matrices of a chip's layers by input name.

    Raises:
        LlmcError: the base's weight file lacks the scales of a layer.
    """
    weights: dict[str, Weight] = {}
    base = case_dir / chip.path / WEIGHTS_NAME
    header = read_weight_header(base) if any(layer.scaled for layer in chip.lora) else {}
    for layer in chip.lora:
        own = [module for module in layer.modules if module in pairs]
        if own:
            left, right = _matrices(layer, own, pairs)
            if layer.scaled:
                rows, columns = (_read_scale(base, name, header.get(name), count) for name, count in
                                 zip(layer.scales, (layer.out_features, layer.in_features),
                                     strict=True))
                left, right = left * columns, right * rows
            weights |= {f"{layer.name}.lora_a": Weight.of(left),
                        f"{layer.name}.lora_b": Weight.of(right)}
    return weights


def _read_scale(path: Path, name: str, stored: StoredWeight | None, count: int) -> np.ndarray:
    """Read a weight float32 [count]."""
    if stored is None or (stored.dtype, tuple(stored.shape)) != ("float32", (count,)):
        raise LlmcError(f"'{path}' has no weight '{name}', float32 [{count}], by which the "
                        f"adapter's matrices are scaled; compile the base again")
    return np.fromfile(path, np.float32, count, offset=stored.start)


def _matrices(layer: LoraLayer, modules: Sequence[str],
              pairs: Mapping[str, LowRank | StackedLowRank]) -> tuple[np.ndarray, np.ndarray]:
    """Stack the factors of a layer's modules: A [rows, in], and B [rows, out], block by block.

    Those of experts are [rows, experts, in] and [rows, experts, out].
    """
    columns = _indices(layer.columns)
    if layer.experts:
        pair, experts, rows = pairs[modules[0]], _indices(layer.experts), _indices(layer.rows)
        if layer.paired:
            rows = rows.reshape(2, -1).T.reshape(-1)
        left, right = (np.ascontiguousarray(own[:, experts][:, :, index]) for own, index in (
            (pair.down, columns), (pair.up, rows)))
        return left, right
    left = np.concatenate([pairs[module].down[:, columns] for module in modules])
    right = np.zeros((len(left), layer.out_features), np.float32)
    starts = dict(zip(modules, np.cumsum([0, *(pairs[module].down.shape[0]
                                               for module in modules)]).tolist(), strict=False))
    column = 0
    for run in layer.rows:
        count = len(run.index)
        if run.module in starts:
            up, start = pairs[run.module].up, starts[run.module]
            right[start:start + up.shape[1], column:column + count] = up[np.array(run.index)].T
        column += count
    return np.ascontiguousarray(left), right


def _indices(runs: Sequence[LayerRows]) -> np.ndarray:
    return np.concatenate([np.array(run.index) for run in runs])


def merge_adapter(raw: RawModel, adapter: PeftAdapter) -> None:
    """Merge an adapter into the weights of an exported model.

    Raises:
        LlmcError: the model has no such parameter, or one of another shape.
    """
    tensors: dict[str, list[gs.Constant]] = {}
    for graph in (graph for graph in (raw.graph, raw.encoder) if graph is not None):
        for tensor in graph.tensors().values():
            if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight):
                tensors.setdefault(tensor.name, []).append(tensor)

    def change(name: str) -> list[gs.Constant]:
        found = find_module(name, list(tensors))
        if found is None:
            raise LlmcError(f"the adapter in '{adapter.directory}' changes '{name}', which "
                            f"'{raw.architecture}' does not have as a separate parameter; give "
                            f"the adapter's own base model, or merge the adapter with PEFT")
        return tensors[found]

    def put(constants: Sequence[gs.Constant], values: Weight, name: str) -> None:
        have = constants[0]._values.shape
        if values.shape != have:
            raise LlmcError(f"the adapter in '{adapter.directory}' has '{name}' as "
                            f"{list(values.shape)}, '{raw.architecture}' as {list(have)}; give the "
                            f"adapter's own base model")
        for constant in constants:
            constant._values = values

    for name, weight in adapter.saved.items():
        put(change(name), weight.cast(np.float32), name)
    modules, values = dict(adapter.modules), {
        name: own[0]._values for name, own in tensors.items()}
    for factors in adapter.experts:
        matrix = find_module(f"{factors.module}.weight", list(tensors))
        if matrix is not None and len(values[matrix].shape) == 2:  # such as a router's
            up, down = factors.stacks(1, "weight")
            modules[factors.module] = LowRank(down[0], up[0])
            continue
        name, up, down = _expert_parameter(adapter, factors, values)
        put(tensors[name], tensors[name][0]._values.plus_product(
            Weight.of(up, name), Weight.of(down, name)), name)
    unknown = {module: pair for module, pair in modules.items()
               if find_module(f"{module}.weight", list(tensors)) is None}
    singles, others = single_factors(adapter, unknown, _stacks_of(values))
    for name, stack in singles.items():
        put(tensors[name], tensors[name][0]._values.plus_product(
            Weight.of(np.ascontiguousarray(stack.up.transpose(1, 2, 0)), name),
            Weight.of(np.ascontiguousarray(stack.down.swapaxes(0, 1)), name)), name)
    modules = {module: pair for module, pair in modules.items()
               if module not in unknown or module in others}
    for module, pair in adapter.embeddings.items():
        constants = change(f"{module}.weight")
        put(constants, _plus(adapter, module, constants[0]._values,
                             LowRank(pair.up.T, pair.down.T)), module)
    for module, pair in modules.items():
        constants = change(f"{module}.weight")
        base, turned = constants[0]._values, _is_turned(adapter, pair, constants[0]._values)
        merged = _plus(adapter, module, base,
                       LowRank(pair.up.T, pair.down.T) if turned else pair)
        if module in adapter.magnitudes:
            if turned:
                raise LlmcError(f"the adapter in '{adapter.directory}' uses DoRA on the transposed "
                                f"matrix of '{module}', which llmc cannot merge; merge it with "
                                f"PEFT")
            merged = merged.with_row_norms(adapter.magnitudes[module].reshape(-1))
        put(constants, merged, module)


def _expert_parameter(adapter: PeftAdapter, factors: ExpertFactors,
                      tensors: Mapping[str, Weight]) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the stack [experts, …] that factors change, and what to add: `up` · `down`.

    Raises:
        LlmcError: no stack of the module has their shape, or several have.
    """
    prefix = f"{factors.module}."
    stacks = {name: weight.shape for name, weight in tensors.items()
              if name.startswith(prefix) and len(weight.shape) == 3}
    sides = len(factors.up), factors.down.shape[1]  # out, in
    turned = _are_turned(stacks, prefix)
    found = [name for name, (count, *shape) in stacks.items()
             if tuple(shape) == (sides[::-1] if turned else sides)
             and len(factors.down) % count == 0]
    if len(found) != 1:
        raise LlmcError(f"the adapter in '{adapter.directory}' changes '{factors.module}' by "
                        f"matrices [{sides[0]}, {sides[1]}] of {len(factors.down)} ranks in all; "
                        f"in the model its stacks are "
                        f"{', '.join(str(list(shape)) for shape in stacks.values()) or 'missing'}; "
                        f"give the adapter's own base model, or merge it with PEFT")
    up, down = factors.stacks(stacks[found[0]][0], found[0].rpartition(".")[2])
    if turned:
        up, down = (np.ascontiguousarray(own.transpose(0, 2, 1)) for own in (down, up))
    return found[0], up, down


def _stacks_of(tensors: Mapping[str, Weight]) -> dict[str, ExpertStack]:
    """The stacks of a model's experts that are stored as [experts, out, in], ups below gates."""
    shapes = {name: weight.shape for name, weight in tensors.items() if len(weight.shape) == 3}
    found = {}
    for name, (count, out, width) in shapes.items():
        parent, _, leaf = name.rpartition(".")
        if not _are_turned(shapes, f"{parent}."):
            gated = leaf == "gate_up_proj"
            found[name] = ExpertStack(count, out, width, tuple(range(out // 2)) if gated else (),
                                      tuple(range(out // 2, out)) if gated else ())
    return found


def _are_turned(stacks: Mapping[str, tuple[int, ...]], prefix: str) -> bool:
    """Whether experts are stored as [experts, in, out], by the sizes of both projections."""
    both, down = stacks.get(f"{prefix}gate_up_proj"), stacks.get(f"{prefix}down_proj")
    return both is not None and down is not None and both[1] != 2 * down[2] \
        and both[2] == 2 * down[1]


def _is_turned(adapter: PeftAdapter, pair: LowRank, base: Weight) -> bool:
    """Whether the model stores a module's matrix as [in, out]."""
    shape = pair.up.shape[0], pair.down.shape[1]
    return shape[::-1] == base.shape and (shape != base.shape or adapter.fan_in_fan_out)


def _plus(adapter: PeftAdapter, module: str, base: Weight, pair: LowRank) -> Weight:
    """A matrix plus the product of two factors."""
    if base.shape != (pair.up.shape[0], pair.down.shape[1]):
        raise LlmcError(f"the adapter in '{adapter.directory}' changes '{module}' as a matrix "
                        f"[{pair.up.shape[0]}, {pair.down.shape[1]}], in the model it is "
                        f"{list(base.shape)}; give the adapter's own base model")
    return base.plus_product(Weight.of(pair.up, module), Weight.of(pair.down, module))
