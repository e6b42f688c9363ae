"""Execution of graphs on ONNX Runtime: graphs between passes, and compiled chips."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort

from llmc import plugins
from llmc.artifacts.manifest import (
    BIDIRECTIONAL_RANGES,
    DEEP_EMBEDS_PREFIX,
    EMBED_IDS,
    EMBEDS,
    INPUT_FEATURES,
    MEMORY_STEPS,
    ROTARY_POSITIONS,
    CollectiveStep,
    Manifest,
    Steps,
    WeightForm,
)
from llmc.artifacts.onnx_graph import check_graph
from llmc.compiler.artifact import Placed, to_onnx
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError, reason_of
from llmc.plugins.quantization import cpu_activation_block, rounded
from llmc.runtime.core.step import Step
from llmc.runtime.multimodal.rotary_positions import IN_CACHE

_FLOAT, _TYPES = onnx.TensorProto.FLOAT, {"float16": onnx.TensorProto.FLOAT16,
                                          "bfloat16": onnx.TensorProto.BFLOAT16}


@dataclass(frozen=True)
class Rounding:
    """Tensors to round in a float32 graph, as an engine that stores them in other dtypes does.

    Args:
        dtype: dtype of matrices, of outputs of GEMMs and attention, and of `stored`.
        kv_dtype: dtype of keys and values of Sdpa nodes; "": `dtype`.
        stored: names of other tensors to round.
        forms: storage formats, by weight name, that quantize activations.
    """

    dtype: str
    kv_dtype: str = ""
    stored: frozenset[str] = frozenset()
    forms: Mapping[str, WeightForm] = field(default_factory=dict)


Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class PromptRows:
    """Rows and positions that a prompt has beside its token ids; see `Step`.

    Args:
        embeds: float32 [num_embeds, width].
        embed_ids: int32 [num_tokens].
        deep_embeds: float32 [num_deep, num_embeds, width].
        rotary_positions: int32 [num_tokens, 3]; None: positions in the cache.
        bidirectional_ranges: int32 [num_tokens, 2]; None: none.
    """

    embeds: np.ndarray
    embed_ids: np.ndarray
    deep_embeds: np.ndarray
    rotary_positions: np.ndarray | None = None
    bidirectional_ranges: np.ndarray | None = None

    def fields(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Fields of a step with the tokens from `start` to `stop`."""
        ids = self.embed_ids[start:stop]
        rows, places = np.unique(ids[ids >= 0], return_inverse=True)
        own = np.full(len(ids), -1, np.int32)
        own[ids >= 0] = places
        fields = {} if self.rotary_positions is None else {
            "rotary_positions": self.rotary_positions[start:stop]}
        return fields if not len(rows) else {
            **fields, "embeds": self.embeds[rows], "embed_ids": own,
            "deep_embeds": self.deep_embeds[:, rows]}


def run_graph(graph: gs.Graph, feeds: Mapping[str, np.ndarray], outputs: Collection[str],
              rounding: Rounding | None = None) -> Values:
    """Compute the named tensors. Reads every weight into memory."""
    return load_graph(graph, outputs, rounding)(feeds)


def load_graph(graph: gs.Graph, outputs: Collection[str], rounding: Rounding | None = None) -> \
        Callable[[Mapping[str, np.ndarray]], Values]:
    """Return a function from inputs to the named tensors. Reads every weight into memory."""
    weights = {tensor.name: tensor._values.load() for tensor in graph.tensors().values()
               if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)}
    model = to_onnx(graph, dict.fromkeys(weights, Placed(0, 0)), target="")
    kv_dtype = rounding.kv_dtype if rounding else ""
    for index, node in enumerate(model.graph.node):
        if node.domain == plugins.DOMAIN and node.op_type == "Sdpa":
            function = _sdpa_function({a.name: onnx.helper.get_attribute_value(a)
                                       for a in node.attribute}, f"sdpa{index}", kv_dtype,
                                      len(node.input) > 4)
            node.input[:] = [name for name in node.input if name]
            node.overload = function.overload
            model.functions.append(function)
    names = sorted(set(outputs))
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if rounding is not None and rounding.dtype in _TYPES:
        import ml_dtypes
        narrow = np.dtype(getattr(ml_dtypes, rounding.dtype, rounding.dtype))
        weights = {name: array.astype(narrow).astype(np.float32)
                   if array.ndim > 1 and array.dtype == np.float32 else array
                   for name, array in weights.items()}
        _round(model.graph, rounding)
    if rounding is not None and rounding.forms:
        _round_activations(model, rounding.forms)
    options.add_external_initializers(
        list(weights), [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()])
    session = ort.InferenceSession(model.SerializeToString(), options,
                                   providers=["CPUExecutionProvider"])
    inputs = {tensor.name for tensor in session.get_inputs()}

    def run(feeds: Mapping[str, np.ndarray]) -> Values:
        results = session.run(names, {k: v for k, v in feeds.items() if k in inputs})
        return dict(zip(names, results, strict=True))

    return run


def _round(graph: onnx.GraphProto, rounding: Rounding) -> None:
    """Cast each tensor to round to its dtype and back."""
    nodes = []
    for node in graph.node:
        nodes.append(node)
        for index, name in enumerate(node.output):
            if name in rounding.stored or node.op_type in ("MatMul", "Gemm", "Sdpa"):
                node.output[index] = f"{name}.exact"
                nodes += [onnx.helper.make_node("Cast", [f"{name}.exact"], [f"{name}.narrow"],
                                                to=_TYPES[rounding.dtype]),
                          onnx.helper.make_node("Cast", [f"{name}.narrow"], [name], to=_FLOAT)]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(nodes)


def _round_activations(model: onnx.ModelProto, forms: Mapping[str, WeightForm]) -> None:
    """Quantize the activations of weights in these formats, as their kernels do."""
    producers = {name: node for node in model.graph.node for name in node.output}
    functions: dict[str, onnx.FunctionProto] = {}
    nodes = []
    for node in model.graph.node:
        weight = node.input[1] if node.op_type in ("MatMul", "Gemm") else ""
        while weight in producers and producers[weight].op_type == "Transpose":
            weight = producers[weight].input[0]
        if weight in forms:
            function = _rounding_function(forms[weight])
            functions[function.overload] = function
            name = f"{node.output[0]}.activations"
            nodes.append(onnx.helper.make_node(
                function.name, [node.input[0]], [name], domain=function.domain,
                overload=function.overload))
            node.input[0] = name
        nodes.append(node)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.functions.extend(functions.values())


def _rounding_function(form: WeightForm) -> onnx.FunctionProto:
    """Return a function that rounds activations x as the kernel of this format does."""
    if form.activation_dtype:
        lines, result = rounded({"activation_dtype": form.activation_dtype,
                                 "activation_scale": form.activation_scale,
                                 "activation_group_size": form.activation_group_size}, "x")
    else:
        block = cpu_activation_block(form.dtype, form.group_size)
        lines, result = [
            "shape = Shape(x)", f"each = Constant<value_ints=[-1, {block}]>()",
            "groups = Reshape(x, each)", "last = Constant<value_ints=[-1]>()",
            "sizes = Abs(groups)", "most = ReduceMax<keepdims=1>(sizes, last)",
            "codes = Constant<value_float=127.0>()", "least = Constant<value_float=1e-30>()",
            "steps = Div(most, codes)", "scale = Max(steps, least)", "scaled = Div(groups, scale)",
            "whole = Round(scaled)", "values = Mul(whole, scale)",
            "result = Reshape(values, shape)"], "result"
    overload = f"{form.activation_dtype}.{form.activation_scale}.{form.activation_group_size}." \
        f"{form.dtype}.{form.group_size}"
    return onnx.parser.parse_function(
        f'<domain: "llmc", overload: "{overload}", opset_import: ["": {plugins.OPSET}]>\n'
        f"QuantizeActivations (x) => (y) {{\n" + "\n".join([*lines, f"y = Identity({result})"])
        + "\n}")


def _sdpa_function(attrs: Mapping[str, float], overload: str, kv_dtype: str,
                   has_sinks: bool) -> onnx.FunctionProto:
    """Return a function of causal attention.

    q is `[batch, heads, seq, dim]`; k and v may have fewer heads (GQA); sinks are `[heads]`.
    """
    lines = [f"{name} = Identity(given_{name})" for name in "kv"]
    if kv_dtype:
        kind = onnx.TensorProto.DataType.Value(kv_dtype.replace("_", "").upper())
        lines = [line for name in "kv" for line in (
            f"{name}8 = Cast<to={kind}>(given_{name})", f"{name} = Cast<to={_FLOAT}>({name}8)")]
    lines += [
        "c0 = Constant<value_ints=[0]>()", "c2 = Constant<value_ints=[2]>()",
        "hq = Shape<start=1, end=2>(q)", "hk = Shape<start=1, end=2>(k)", "g = Div(hq, hk)",
        "b = Shape<start=0, end=1>(q)", "sd = Shape<start=2, end=4>(q)",
        "five = Concat<axis=0>(b, hk, g, sd)", "q5 = Reshape(q, five)",
        "k5 = Unsqueeze(k, c2)", "v5 = Unsqueeze(v, c2)",
        "kt = Transpose<perm=[0, 1, 2, 4, 3]>(k5)", "p = MatMul(q5, kt)",
        f"scale = Constant<value_float={float(attrs['scale'])!r}>()", "s0 = Mul(p, scale)"]
    scores = "s0"
    if attrs["softcap"]:
        lines += [f"cap = Constant<value_float={float(attrs['softcap'])!r}>()",
                  "s1 = Div(s0, cap)", "s2 = Tanh(s1)", "s3 = Mul(s2, cap)"]
        scores = "s3"
    lines += ["zero = Constant<value_int=0>()", "one = Constant<value_int=1>()",
              "n1 = Shape<start=2, end=3>(q)", "n = Squeeze(n1)", "r = Range(zero, n, one)",
              "c1 = Constant<value_ints=[1]>()", "i = Unsqueeze(r, c1)", "m0 = LessOrEqual(r, i)"]
    mask = "m0"
    if attrs["window"]:
        lines += [f"w = Constant<value_int={int(attrs['window'])}>()", "edge = Sub(i, w)",
                  "recent = Greater(r, edge)", "m1 = And(m0, recent)"]
        mask = "m1"
    if attrs["chunk"]:
        lines += [f"chunk = Constant<value_int={int(attrs['chunk'])}>()",
                  "query_chunk = Div(i, chunk)", "key_chunk = Div(r, chunk)",
                  "same = Equal(query_chunk, key_chunk)",
                  f"m2 = And({mask}, same)"]
        mask = "m2"
    lines += ["low = Constant<value_float=-1e30>()", f"s4 = Where({mask}, {scores}, low)"]
    if has_sinks:
        lines += ["one_kind = Constant<value_ints=[1]>()", "last = Constant<value_ints=[-1]>()",
                  "by_head = Concat<axis=0>(one_kind, hk, g, one_kind, one_kind)",
                  "sink5 = Reshape(sinks, by_head)", "rows = Shape<end=4>(s4)",
                  "grid = Concat<axis=0>(rows, one_kind)", "sink = Expand(sink5, grid)",
                  "s5 = Concat<axis=-1>(sink, s4)", "all = Softmax<axis=-1>(s5)",
                  "end = Constant<value_ints=[2147483647]>()",
                  "a = Slice(all, one_kind, end, last)"]
    else:
        lines.append("a = Softmax<axis=-1>(s4)")
    lines += ["o5 = MatMul(a, v5)",
              "od = Shape<start=3, end=4>(v)", "four = Concat<axis=0>(b, hq, n1, od)",
              "o = Reshape(o5, four)"]
    return onnx.parser.parse_function(
        f'<domain: "llmc", overload: "{overload}", opset_import: ["": {plugins.OPSET}]>\n'
        f"Sdpa (q, given_k, given_v{', sinks' if has_sinks else ''}) => (o) {{\n"
        + "\n".join(lines) + "\n}")


def run_chips(manifest: Manifest, case_dir: Path, ids: Sequence[int],
              requested: Collection[str], rows: PromptRows | None = None,
              memory: Sequence[Values] = ()) -> list[Values]:
    """Prefill a model compiled for CPUs, all chips in lockstep.

    Args:
        memory: encoder outputs of each chip; encoder-decoder models only.

    Returns:
        For each chip, the requested tensors in the graph's order.

    Raises:
        LlmcError: a file cannot be run.
    """
    step = Step.of([ids], [0], [[0]], [0], logits="all")
    states: list[Values] = []
    for chip in manifest.chips:
        state = {"input_ids": step.token_ids, "position_ids": step.position_ids,
                 "cu_seqlens": step.cu_seqlens, "past_lens": step.past_lens,
                 "commit_lens": step.commit_lens,
                 "logits_indices": step.logits_indices}
        for name, cache in chip.caches.items():
            state[name] = np.zeros((1, cache.num_kv_heads, manifest.dims.max_seq_len,
                                    cache.head_dim), np.float32)
        for name, kept_state in chip.state_caches.items():
            state[name] = np.zeros((1, *kept_state.shape), np.float32)
        if manifest.embeds_width:
            state[EMBED_IDS] = np.full(len(ids), -1, np.int32) if rows is None else rows.embed_ids
            state[EMBEDS] = np.zeros((1, manifest.embeds_width), np.float32) \
                if rows is None else rows.embeds
            state |= {f"{DEEP_EMBEDS_PREFIX}{index}": np.zeros_like(state[EMBEDS])
                      if rows is None else rows.deep_embeds[index]
                      for index in range(manifest.num_deep_embeds)}
        if manifest.image and manifest.image.grid:
            state[ROTARY_POSITIONS] = IN_CACHE.within(0, len(ids)) \
                if rows is None or rows.rotary_positions is None else rows.rotary_positions
        if manifest.image and manifest.image.bidirectional:
            state[BIDIRECTIONAL_RANGES] = np.zeros((len(ids), 2), np.int32) \
                if rows is None or rows.bidirectional_ranges is None else rows.bidirectional_ranges
        if manifest.memory and chip.encoder:  # no images: a row of zeros
            state |= {tensor.name: np.zeros((1, tensor.width), np.float32)
                      for tensor in chip.encoder.outputs}
            state |= {"memory_starts": np.zeros(1, np.int32),
                      "encoder_sequence_length": np.ones(1, np.int32),
                      MEMORY_STEPS: np.ones(1, np.int32),
                      EMBED_IDS: np.zeros(len(ids), np.int32)}
        if memory:
            own = memory[chip.rank]
            count = len(next(iter(own.values())))
            state |= own | {"memory_starts": np.zeros(1, np.int32),
                            "encoder_sequence_length": np.array([count], np.int32),
                            MEMORY_STEPS: np.ones(1, np.int32)}
        if chip.lora:
            state["lora_ids"] = state["lora_logits_ids"] = step.lora_ids
        for name, (dtype, shape) in chip.lora_inputs.items():  # no adapter's rows
            state[name] = np.zeros([dim if isinstance(dim, int) else 0 for dim in shape], dtype)
        states.append(state)
    return _run_in_lockstep(case_dir, [chip.steps for chip in manifest.chips], states, requested)


def run_encoders(manifest: Manifest, case_dir: Path, features: np.ndarray) -> list[Values]:
    """Run the encoder of an encoder-decoder model compiled for CPUs, all chips in lockstep.

    Args:
        features: float32 [num_rows, width], what it reads in place of tokens.

    Returns:
        For each chip the encoder outputs, the cross-attention KV of its heads.

    Raises:
        LlmcError: a file cannot be run.
    """
    encoders = [chip.encoder for chip in manifest.chips if chip.encoder]
    count = len(features)
    given = {INPUT_FEATURES: features, "position_ids": np.arange(count),
             "cu_seqlens": np.array([0, count], np.int32)}
    outputs = {tensor.name for tensor in encoders[0].outputs}
    return _run_in_lockstep(case_dir, [encoder.steps for encoder in encoders],
                            [dict(given) for _ in encoders], outputs)


def _run_in_lockstep(case_dir: Path, programs: Sequence[Steps], states: Sequence[Values],
                     requested: Collection[str]) -> list[Values]:
    """Run a program of each chip; return for each the requested tensors.

    Args:
        states: inputs of each, to which the outputs of steps are added.
    """
    kept: list[Values] = [{} for _ in states]
    for steps in zip(*programs, strict=True):
        if isinstance(steps[0], CollectiveStep):
            parts = [state[steps[0].input] for state in states]
            whole = sum(parts[1:], parts[0]) if steps[0].kind == "all_reduce" \
                else np.concatenate(parts, axis=-1)
            for state, keep in zip(states, kept, strict=True):
                state[steps[0].output] = keep[steps[0].output] = whole
            continue
        for step, state, keep in zip(steps, states, kept, strict=True):
            assert not isinstance(step, CollectiveStep)  # all chips have the same steps
            results = _run_file(case_dir / step.path, state, requested)
            state.update(results)
            keep.update((name, array) for name, array in results.items() if name in requested)
    return kept


def _run_file(path: Path, state: Mapping[str, np.ndarray], requested: Collection[str]) -> \
        Values:
    """Run an ONNX file; return its outputs and the requested inner tensors, in graph order."""
    check_graph(path)
    model = read_onnx(path)
    outputs = [value.name for value in model.graph.output]
    inside = [name for node in model.graph.node for name in node.output
              if name in requested and name not in outputs]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inside)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path",
                                     str(path.parent))
    names = [name for node in model.graph.node for name in node.output
             if name in {*outputs, *inside}]
    try:
        session = ort.InferenceSession(model.SerializeToString(), options,
                                       providers=["CPUExecutionProvider"])
        results = session.run(names, {t.name: state[t.name] for t in session.get_inputs()})
    except Exception as error:  # ONNX Runtime's errors share no base class
        raise LlmcError(f"'{path}' cannot be run ({reason_of(error)}); compile the model again") \
            from error
    return dict(zip(names, results, strict=True))


def read_onnx(path: Path) -> onnx.ModelProto:
    """Read an ONNX file without external data.

    Raises:
        LlmcError: the file is missing or not ONNX.
    """
    try:
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise LlmcError(f"'{path}' cannot be read ({error.strerror}); compile the model again") \
            from error
    except Exception as error:  # protobuf's DecodeError, whose package varies
        raise LlmcError(f"'{path}' is not ONNX ({reason_of(error)}); compile the model again") \
            from error
