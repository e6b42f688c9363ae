"""Where, and by how much, a compiled model differs from the original.

Three things are run on the same tokens: transformers, the raw export, and the compiled graphs of
all chips, in lockstep. They are compared, on Polygraphy's comparator, layer by layer, then at the
logits and in greedy tokens. A compiled graph keeps the names of the tensors it still computes, so
every one of them can be held against the raw export: that is how `bisect` finds the first op over
tolerance. Weights are compared too, with what the reference gives for each chip, which names a
damaged one.

What is compiled for the cuda target runs on its engine, which hands out every value as it is made.
Of the tensorrt target the plan itself runs, and its plugins hand out theirs: whatever llmc's ops
make, and the logits.
The reference is float32 whatever the model's dtype, so 16 bits have wider tolerances, and their
greedy tokens are shown but not judged: rounding decides between two that are almost as likely.
"""

from __future__ import annotations

import html as html_text
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
from polygraphy.comparator import Comparator, IterationResult, RunResults, SimpleCompareFunc
from polygraphy.logger import G_LOGGER

from llmc.compiler.check.execute import run_graph
from llmc.compiler.check.reference import load_reference
from llmc.compiler.frontend import RawModel, load
from llmc.compiler.graph.names import HIDDEN_STATE
from llmc.compiler.graph.weights import Weight
from llmc.compiler.lower import lower
from llmc.compiler.targets import Options
from llmc.errors import LlmcError
from llmc.runtime.attention.metadata import PackedBatch
from llmc.runtime.decoding.params import SamplingParams
from llmc.runtime.devices import place
from llmc.runtime.engines import MAX_LOGITS
from llmc.runtime.engines.cuda import device_count
from llmc.runtime.llm import LLM
from llmc.runtime.manifest import (
    CollectiveStep,
    Manifest,
    hash_file,
    read_manifest,
    refuse_encoder,
)
from llmc.runtime.replica import Replica
from llmc.runtime.schedule import SCHEDULE_NAME, read_schedule
from llmc.runtime.tokenizer import load_tokenizer

_TOKENS = 24
# By dtype. In 16 bits it is 41 roundings; SmolLM2-135M's worst tensor is off by 6e-3 and 7e-2.
TOLERANCES = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.16, "float8_e4m3fn": 0.1}


@dataclass(frozen=True)
class Difference:
    """One tensor of two runs. `relative` is max_abs over the reference's range."""

    name: str
    pair: str
    max_abs: float
    relative: float
    cosine: float
    passed: bool


@dataclass(frozen=True)
class BadWeight:
    """A weight of a chip that is not what the reference gives."""

    chip: int
    name: str
    layer: int | None
    elements: int
    max_abs: float


@dataclass(frozen=True)
class DiffReport:
    """All that was compared. `verdict` is None when everything is within tolerance.

    `first_op` (with `bisect`) is the first tensor over tolerance, with its op and chip.
    """

    case_dir: str
    reference: str
    tolerance: float
    layers: tuple[Difference, ...]
    first_layer: str | None
    first_op: str | None
    weights: tuple[BadWeight, ...]
    changed_files: tuple[str, ...]
    tokens: tuple[int, ...]
    reference_tokens: tuple[int, ...] | None
    verdict: str | None


def diff(case_dir: str | Path, reference: str | Path, *, hf_dir: str | Path | None = None,
         prompt: str | None = None, tolerance: float | None = None, tokens: int = 16,
         bisect: bool = False) -> DiffReport:
    """Compare a case directory with what it was compiled from.

    Args:
        reference: Hugging Face directory, .gguf or .onnx file.
        prompt: text to run; random tokens by default.
        tolerance: largest difference relative to the reference tensor's range; by default what
            `TOLERANCES` has for the model's dtype and its caches'.
        tokens: greedy tokens to compare.
        bisect: compare every tensor that both graphs have, and name the first over tolerance.

    Raises:
        LlmcError: either side cannot be read, or there is no GPU for what is compiled for one.
    """
    G_LOGGER.module_severity = G_LOGGER.CRITICAL
    manifest = read_manifest(case_dir)
    refuse_encoder(manifest, "diff")
    root = Path(case_dir)
    run = {"cpu": _run_compiled, "cuda": _trace, "tensorrt": _trace}.get(manifest.target.kind)
    if run is None:
        raise LlmcError(f"diff cannot run what is compiled for target {manifest.target.kind}; "
                        f"compile for cpu or cuda to compare")
    if tolerance is None:
        tolerance = max(TOLERANCES[manifest.dtype], TOLERANCES[manifest.kv_dtype])
    changed = tuple(entry.path for entry in manifest.files
                    if not (root / entry.path).is_file()
                    or hash_file(root / entry.path) != entry.sha256)
    ids = _token_ids(manifest, root, prompt)
    raw = load(reference, hf_dir=hf_dir)
    layer_names = [HIDDEN_STATE.format(i) for i in range(manifest.dims.num_layers)]
    raw_names = {t.name for node in raw.graph.nodes for t in node.outputs if not t.is_empty()}
    compiled = run(manifest, root, ids, raw_names | {"logits"})
    order = [name for name in compiled[0] if name in raw_names]
    feeds = {"input_ids": ids[None], "position_ids": np.arange(len(ids))[None]}
    wanted = order if bisect else [*(n for n in layer_names if n in raw_names), "logits"]
    exported = run_graph(raw.graph, feeds, wanted)
    original = _run_transformers(reference, raw, ids, tokens)

    runs = {"compiled": {name: _joined(compiled, name, exported.get(name)) for name in order},
            "export": {name: array.reshape(-1, array.shape[-1])
                       for name, array in exported.items() if array.ndim >= 2}}
    runs["compiled"]["logits"] = runs["compiled"]["logits"][:, :manifest.dims.vocab_size]
    if original is not None:
        runs["transformers"] = original[0]
    shown = [*(name for name in layer_names if name in runs["compiled"]), "logits"]
    pairs = [("compiled", "export")]
    if original is not None:
        pairs += [("export", "transformers"), ("compiled", "transformers")]
    layers = tuple(difference for name in shown for left, right in pairs
                   if name in runs[left] and name in runs[right]
                   for difference in [compare(name, f"{left} vs {right}", runs[left][name],
                                              runs[right][name], tolerance)])
    first = next((d.name for d in layers if not d.passed and d.pair.startswith("compiled")), None)
    first_op = _bisect(runs, order, compiled, manifest, root, tolerance) if bisect else None
    weights = _compare_weights(raw, manifest, root)
    made, expected = _greedy(root, ids, tokens), original[1] if original else None
    report = DiffReport(str(case_dir), str(reference), tolerance, layers, first, first_op, weights,
                        changed, made, expected, None)
    verdict = _verdict(report, judge_tokens=manifest.dtype == "float32")
    return DiffReport(**{**report.__dict__, "verdict": verdict})


def _verdict(report: DiffReport, judge_tokens: bool) -> str | None:
    """One sentence for what is over tolerance, or None."""
    parts = []
    if report.first_layer:
        parts.append(f"first over tolerance {report.tolerance:g}: {report.first_layer}")
    for bad in report.weights[:3]:
        layer = f" of layer {bad.layer}" if bad.layer is not None else ""
        parts.append(f"chip {bad.chip}'s weight '{bad.name}'{layer} differs in {bad.elements} "
                     f"element(s), by up to {bad.max_abs:.3g}")
    other = next((d for d in report.layers if not d.passed), None)
    if not parts and other is not None:
        parts.append(f"{other.pair} differ at {other.name}")
    if not parts and judge_tokens and report.reference_tokens is not None \
            and report.tokens != report.reference_tokens:
        parts.append("the greedy tokens differ")
    return "; ".join(parts) or None


def compare(name: str, pair: str, actual: np.ndarray, expected: np.ndarray, tolerance: float) -> \
        Difference:
    """Compare two arrays on Polygraphy's comparator, absolutely, by `tolerance` of the range."""
    span = float(np.ptp(expected)) or 1.0
    runs = RunResults()
    runs.append(("actual", [IterationResult({name: actual.astype(np.float32)})]))
    runs.append(("expected", [IterationResult({name: expected.astype(np.float32)})]))
    result = Comparator.compare_accuracy(
        runs, compare_func=SimpleCompareFunc(atol=tolerance * span, rtol=0.0))
    outcome = result[0]["actual", "expected"][0][name]
    a, b = actual.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return Difference(name, pair, float(outcome.max_absdiff), float(outcome.max_absdiff) / span,
                      float(a @ b) / norms if norms else 1.0, bool(outcome))


def _token_ids(manifest: Manifest, root: Path, prompt: str | None) -> np.ndarray:
    if prompt is None:
        count = min(_TOKENS, manifest.dims.max_seq_len)
        return np.random.default_rng(0).integers(0, manifest.dims.vocab_size, count)
    tokenizer = load_tokenizer(manifest, root)
    if tokenizer is None:
        raise LlmcError("this model was compiled without a tokenizer; leave --prompt out")
    ids = np.array(tokenizer.encode(prompt).ids, dtype=np.int64)
    if len(ids) > manifest.dims.max_seq_len:
        raise LlmcError(f"the prompt has {len(ids)} tokens, more than max_seq_len "
                        f"{manifest.dims.max_seq_len}; shorten it")
    return ids


def _trace(manifest: Manifest, root: Path, ids: np.ndarray, wanted: set[str]) -> \
        list[dict[str, np.ndarray]]:
    """Prefill on GPUs: per chip, the wanted tensors in the schedule's order."""
    replica = Replica(manifest, root, place(manifest, None, device_count())[0], 1,
                      min(len(ids), MAX_LOGITS))
    try:
        steps = [replica.trace(PackedBatch.prepare(
            [ids[start:start + MAX_LOGITS].tolist()], [start], all_logits=True))
            for start in range(0, len(ids), MAX_LOGITS)]
    finally:
        replica.close()
    return [{name: np.concatenate([step[rank][name] for step in steps])
             for name in steps[0][rank] if name in wanted} for rank in range(manifest.tp_size)]


def _run_compiled(manifest: Manifest, root: Path, ids: np.ndarray, wanted: set[str]) -> \
        list[dict[str, np.ndarray]]:
    """Prefill on all chips in lockstep on the CPU: per chip, the wanted tensors in the graph's
    order.
    """
    batch = PackedBatch.prepare([ids.tolist()], [0], all_logits=True)
    states: list[dict[str, np.ndarray]] = []
    for chip in manifest.chips:
        state = {"input_ids": batch.input_ids, "position_ids": batch.position_ids,
                 "cu_seqlens": batch.cu_seqlens, "past_lens": batch.past_lens,
                 "logits_indices": batch.logits_indices.astype(np.int64),
                 "cache_indirection": batch.rows_of_positions(manifest.dims.max_seq_len)}
        for layer, cache in enumerate(chip.cache):
            shape = (1, cache.num_kv_heads, manifest.dims.max_seq_len, cache.head_dim)
            for kind in ("key", "value"):
                state[f"{kind}_cache_{layer}"] = np.zeros(shape, np.float32)
        states.append(state)
    kept: list[dict[str, np.ndarray]] = [{} for _ in states]
    for index, step in enumerate(manifest.chips[0].steps):
        if isinstance(step, CollectiveStep):
            parts = [state[step.input] for state in states]
            whole = sum(parts[1:], parts[0]) if step.kind == "all_reduce" \
                else np.concatenate(parts, axis=-1)
            for state, keep in zip(states, kept, strict=True):
                state[step.output] = keep[step.output] = whole
            continue
        for chip, state, keep in zip(manifest.chips, states, kept, strict=True):
            results = _run_file(root / chip.steps[index].path, state, wanted)
            state.update(results)
            keep.update((name, array) for name, array in results.items() if name in wanted)
    return kept


def _run_file(path: Path, state: dict[str, np.ndarray], wanted: set[str]) -> dict[str, np.ndarray]:
    """Run one ONNX file; its own outputs, and the wanted tensors inside it, in graph order."""
    model = onnx.load(path, load_external_data=False)
    own = [value.name for value in model.graph.output]
    inside = [name for node in model.graph.node for name in node.output
              if name in wanted and name not in own]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inside)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path",
                                     str(path.parent))
    session = ort.InferenceSession(model.SerializeToString(), options,
                                   providers=["CPUExecutionProvider"])
    feeds = {tensor.name: state[tensor.name] for tensor in session.get_inputs()}
    names = [name for node in model.graph.node for name in node.output if name in {*own, *inside}]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _joined(compiled: Sequence[dict[str, np.ndarray]], name: str,
            reference: np.ndarray | None) -> np.ndarray:
    """A tensor of all chips: the same on each, or cut along the last axis."""
    parts = [chip[name] for chip in compiled if name in chip]
    if len(parts) > 1 and (reference is None or parts[0].shape[-1] != reference.shape[-1]) \
            and name != "logits":
        return np.concatenate(parts, axis=-1)
    return parts[0]


def _run_transformers(reference: str | Path, raw: RawModel, ids: np.ndarray, count: int) -> \
        tuple[dict[str, np.ndarray], tuple[int, ...]] | None:
    """Each layer's hidden state, the logits and greedy tokens; None for an .onnx reference."""
    if raw.kind == "onnx":
        return None
    import torch

    model = load_reference(reference)
    depth = model.config.get_text_config().num_hidden_layers
    layers: Any = next((module for module in model.modules()
                        if isinstance(module, torch.nn.ModuleList) and len(module) == depth), [])
    seen: dict[str, np.ndarray] = {}

    def keep(name: str):
        def hook(module, arguments, output):
            hidden = output[0] if isinstance(output, tuple) else output
            seen.setdefault(name, hidden.detach().reshape(-1, hidden.shape[-1]).numpy().copy())
        return hook

    for index, layer in enumerate(layers):
        layer.register_forward_hook(keep(HIDDEN_STATE.format(index)))
    with torch.no_grad():
        tokens = torch.from_numpy(ids)[None]
        seen["logits"] = model(input_ids=tokens, use_cache=False).logits[0].numpy()
        out = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens),
                             max_new_tokens=count, do_sample=False, eos_token_id=None)
    return seen, tuple(out[0, len(ids):].tolist())


def _greedy(root: Path, ids: np.ndarray, count: int) -> tuple[int, ...]:
    with LLM(root, verify=False, max_batch_size=1) as llm:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        return llm.generate([ids.tolist()], params)[0].token_ids


def _bisect(runs: dict[str, dict[str, np.ndarray]], order: list[str],
            compiled: list[dict[str, np.ndarray]], manifest: Manifest, root: Path,
            tolerance: float) -> str | None:
    """The first tensor, in graph order, in which the compiled graph leaves the export."""
    ops = _ops(manifest, root)
    for name in order:
        actual, expected = runs["compiled"][name], runs["export"].get(name)
        if expected is None or actual.shape != expected.shape:
            continue
        found = compare(name, "compiled vs export", actual, expected, tolerance)
        if found.passed:
            continue
        chips = ""
        if len(compiled) > 1 and compiled[0][name].shape[-1] != expected.shape[-1]:
            ends = np.cumsum([chip[name].shape[-1] for chip in compiled])[:-1]
            worst = [float(np.abs(a - b).max()) for a, b in zip(
                np.split(actual, ends, axis=-1), np.split(expected, ends, axis=-1), strict=True)]
            chips = f" on chip {int(np.argmax(worst))}"
        return (f"{ops.get(name, '?')} '{name}'{chips}: max abs {found.max_abs:.3g}, relative "
                f"{found.relative:.3g}")
    return None


def _ops(manifest: Manifest, root: Path) -> dict[str, str]:
    """Which op makes each tensor."""
    directory = root / manifest.chips[0].path
    if manifest.target.kind == "cuda":
        schedule = read_schedule(directory / SCHEDULE_NAME)
        return {schedule.tensors[number].name: node.op for node in schedule.nodes
                for number in node.outputs if number >= 0}
    model = onnx.load(directory / "graph.onnx", load_external_data=False)
    return {name: node.op_type for node in model.graph.node for name in node.output}


def _compare_weights(raw: RawModel, manifest: Manifest, root: Path) -> tuple[BadWeight, ...]:
    """Hold every weight of every chip against what the reference gives. Consumes `raw.graph`."""
    from safetensors import safe_open

    lowered = lower(raw, Options(manifest.dtype, target=manifest.target.kind,
                                 tp_size=manifest.tp_size, max_seq_len=manifest.dims.max_seq_len))
    bad = []
    for rank, graph in enumerate(lowered.graphs):
        with safe_open(root / f"chip{rank}" / "weights.safetensors", framework="np") as file:
            for tensor in graph.tensors().values():
                if not (isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)):
                    continue
                have, start, count, worst = file.get_slice(tensor.name), 0, 0, 0.0
                for block in tensor._values.blocks():
                    there = have[start:start + len(block)]
                    start += len(block)
                    wrong = ~((there == block) | (np.isnan(there) & np.isnan(block)))
                    if wrong.any():
                        count += int(wrong.sum())
                        gap = there[wrong].astype(np.float64) - block[wrong].astype(np.float64)
                        worst = max(worst, float(np.abs(gap).max()))
                if count:
                    layer = re.search(r"\.(\d+)\.", tensor.name)
                    bad.append(BadWeight(rank, tensor.name, int(layer[1]) if layer else None,
                                         count, worst))
    return tuple(bad)


def print_report(report: DiffReport) -> None:
    """The report as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("tensor", "pair", "max abs", "relative", "cosine", "")
    for d in report.layers:
        table.add_row(d.name, d.pair, f"{d.max_abs:.3e}", f"{d.relative:.3e}", f"{d.cosine:.8f}",
                      "ok" if d.passed else "OVER")
    console.print(table)
    for name in report.changed_files:
        console.print(f"{name} has changed since it was compiled")
    if report.reference_tokens is not None:
        same = sum(a == b for a, b in zip(report.tokens, report.reference_tokens, strict=False))
        console.print(f"greedy tokens: {same} of {len(report.reference_tokens)} equal")
    if report.first_op:
        console.print(f"first op over tolerance: {report.first_op}")
    console.print(report.verdict or f"within tolerance {report.tolerance:g}")


def write_html(report: DiffReport, path: str | Path) -> None:
    """The report as one HTML file with a plot of the relative error by layer.

    Raises:
        LlmcError: the file cannot be written.
    """
    rows = "".join(
        f"<tr class='{'ok' if d.passed else 'over'}'><td>{html_text.escape(d.name)}</td>"
        f"<td>{d.pair}</td><td>{d.max_abs:.3e}</td><td>{d.relative:.3e}</td>"
        f"<td>{d.cosine:.8f}</td></tr>" for d in report.layers)
    text = (
        "<!doctype html><meta charset='utf-8'><title>llmc diff</title><style>"
        "body{font:14px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:right}"
        ".over{color:#b00;font-weight:bold}</style>"
        f"<h1>llmc diff</h1><p>{html_text.escape(report.case_dir)} against "
        f"{html_text.escape(report.reference)}, tolerance {report.tolerance:g}</p>"
        f"<p>{html_text.escape(report.verdict or 'within tolerance')}</p>"
        f"<p>{html_text.escape(report.first_op or '')}</p>{_plot(report)}"
        "<table><tr><th>tensor</th><th>pair</th><th>max abs</th><th>relative</th><th>cosine</th>"
        f"</tr>{rows}</table>")
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LlmcError(f"'{path}' cannot be written ({error})") from error


def _plot(report: DiffReport) -> str:
    """Relative error by layer, logarithmic, as inline SVG: one line a pair."""
    names = list(dict.fromkeys(d.name for d in report.layers))
    width, height, low, high = 720, 260, -9.0, 1.0
    step = (width - 60) / max(1, len(names) - 1)

    def y(value: float) -> float:
        scaled = min(high, max(low, float(np.log10(max(value, 1e-12)))))
        return 20 + (high - scaled) / (high - low) * (height - 40)

    parts = [f"<line x1='40' x2='{width}' y1='{y(report.tolerance)}' y2='{y(report.tolerance)}' "
             f"stroke='#b00' stroke-dasharray='4'/>"]
    for exponent in range(-9, 2, 2):
        parts.append(f"<text x='0' y='{y(10.0**exponent) + 4}' font-size='11'>1e{exponent}</text>")
    for pair, colour in zip(dict.fromkeys(d.pair for d in report.layers),
                            ("#06c", "#093", "#c60"), strict=False):
        points = " ".join(f"{40 + names.index(d.name) * step:.1f},{y(d.relative):.1f}"
                          for d in report.layers if d.pair == pair)
        parts.append(f"<polyline fill='none' stroke='{colour}' points='{points}'>"
                     f"<title>{pair}</title></polyline>")
    return f"<svg width='{width + 20}' height='{height}'>{''.join(parts)}</svg>"
