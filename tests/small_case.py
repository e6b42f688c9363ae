"""A handwritten case directory for the CUDA engine: an encoder and a decoder, without an export."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from llmc import plugins
from llmc.artifacts.manifest import (
    FORMAT_VERSION,
    Chip,
    Dims,
    EncoderInfo,
    EncoderProgram,
    FileEntry,
    GraphStep,
    LayerCache,
    Manifest,
    Source,
    StateCache,
    Target,
    TensorInfo,
    TokenizerInfo,
    hash_file,
    write_manifest,
)

HIDDEN, HEADS, DIM, INNER, VOCAB, PADDED, LENGTH, LAYERS = 16, 2, 8, 12, 20, 32, 8, 2
ATTENTION = {"num_heads": HEADS, "num_kv_heads": 1, "head_dim": DIM}


class Draft:
    """Builder of a program; values get arena memory that no live value uses."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = weights
        self.tensors: list[dict] = []
        self.nodes: list[dict] = []
        self._rng = np.random.default_rng(len(weights))

    def _add(self, **tensor) -> int:
        known = next((number for number, other in enumerate(self.tensors)
                      if (other["name"], other["kind"]) == (tensor["name"], tensor["kind"])), None)
        if known is None:
            self.tensors.append(tensor)
        return len(self.tensors) - 1 if known is None else known

    def given(self, name: str, *shape: int | str, dtype: str = "int32", kind: str = "input") -> int:
        return self._add(name=name, kind=kind, dtype=dtype, shape=list(shape))

    def weight(self, name: str, *shape: int) -> int:
        if name not in self.weights:
            self.weights[name] = self._rng.standard_normal(shape).astype(np.float32)
        return self._add(name=name, kind="weight", dtype="float32", shape=list(shape))

    def node(self, op: str, inputs: Sequence[int], *makes: tuple[str, int], fields=None,
             logits: bool = False, in_place: int = 0) -> int:
        """Add a node; return its first output."""
        outputs = []
        for name, width in makes:
            self.tensors.append(dict(
                name=name, kind="value", dtype="float32",
                shape=["num_logits" if logits else "num_tokens", width], per_logit=logits))
            outputs.append(len(self.tensors) - 1)
        self.nodes.append(dict(op=op, fields=fields or {}, inputs=list(inputs),
                               outputs=outputs + [-1] * in_place))
        return outputs[0] if outputs else -1

    def finish(self, logits: int = -1) -> dict:
        """Assign offsets to the values in the order of their producers."""
        uses: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            for number in (*node["inputs"], *node["outputs"]):
                uses[number] = index
        uses[logits] = len(self.nodes)
        for node in self.nodes:
            if node["op"] == "Gather":
                uses[node["inputs"][0]] = max(uses[node["inputs"][0]], uses[node["outputs"][0]])
        placed: list[tuple[int, int, int, bool]] = []  # until, start, stop, logits?
        for index, node in enumerate(self.nodes):
            for number in node["outputs"]:
                if number < 0:
                    continue
                tensor = self.tensors[number]
                size, at = tensor["shape"][1] * 4, 0
                for until, start, stop, per_logit in sorted(placed, key=lambda p: p[1]):
                    if until >= index and per_logit == tensor["per_logit"] \
                            and start < at + size and at < stop:
                        at = stop
                tensor["offset"] = at
                placed.append((uses[number], at, at + size, tensor["per_logit"]))
        ends = [max((stop for _, _, stop, kind in placed if kind == per_logit), default=0)
                for per_logit in (False, True)]
        return dict(tensors=self.tensors, nodes=self.nodes, token_bytes=ends[0],
                    logit_bytes=ends[1], logits=logits)


def encoder(weights: dict[str, np.ndarray]) -> dict:
    """An embedding, attention with a distance bias, and the encoder output."""
    d = Draft(weights)
    cu = d.given("cu_seqlens", "batch_plus_1")
    x = d.node("Embedding", [d.given("input_ids", "num_tokens", dtype="int64"),
                             d.weight("shared", PADDED, HIDDEN)], ("x", HIDDEN),
               fields={"scale": 2.0})
    normed = d.node("LayerNorm", [x, d.weight("e.norm", HIDDEN), d.weight("e.norm.bias", HIDDEN)],
                    ("normed", HIDDEN))
    heads = [d.node("GemmBiasAct", [normed, d.weight(f"e.{name}", width, HIDDEN)], (name, width))
             for name, width in (("q", HEADS * DIM), ("k", DIM), ("v", DIM))]
    seen = d.node("BidirectionalAttention",
                  [*heads, cu, -1, -1, d.weight("e.distances", HEADS, 5)], ("seen", HEADS * DIM),
                  fields=ATTENTION)
    done = d.node("GemmBiasRes", [seen, d.weight("e.o", HIDDEN, HEADS * DIM), -1, x],
                  ("done", HIDDEN))
    rows = d.given("memory_rows", "num_tokens", dtype="int64")
    for kind in ("key", "value"):
        made = d.node("GemmBiasAct", [done, d.weight(f"e.memory.{kind}", DIM, HIDDEN)],
                      (f"memory_{kind}_0", DIM))
        d.node("Scatter", [made, rows, d.given(f"memory_{kind}_0", "num_memory_tokens", DIM,
                                               dtype="float32", kind="memory")])
    return d.finish()


def decoder(weights: dict[str, np.ndarray], states: bool) -> dict:
    """Two layers with rotary embedding; the first has cross-attention.

    The second may have two recurrent states.
    """
    d = Draft(weights)
    cu, past = d.given("cu_seqlens", "batch_plus_1"), d.given("past_lens", "batch")
    blocks = d.given("block_table", "batch", "max_blocks")
    x = d.node("Embedding", [d.given("input_ids", "num_tokens", dtype="int64"),
                             d.weight("shared", PADDED, HIDDEN),
                             d.given("position_ids", "num_tokens", dtype="int64"),
                             d.weight("positions", LENGTH, HIDDEN)], ("x", HIDDEN))
    normed = d.node("RMSNorm", [x, d.weight("norm", HIDDEN)], ("normed", HIDDEN))
    for layer in range(LAYERS):
        qkv = d.node("GemmBiasAct", [normed, d.weight(f"{layer}.qkv", (HEADS + 2) * DIM, HIDDEN),
                                     d.weight(f"{layer}.qkv.bias", (HEADS + 2) * DIM)],
                     (f"{layer}.qkv", (HEADS + 2) * DIM))
        if layer == 1 and states:
            slots = d.given("state_slots", "batch")
            before = d.given("state_0", "num_states", 2, (HEADS + 2) * DIM, dtype="float32",
                             kind="state")
            qkv = d.node("CausalConv1d", [qkv, d.weight("taps", (HEADS + 2) * DIM, 3), before, cu,
                                          past, -1, slots],
                         ("mixed", (HEADS + 2) * DIM), in_place=1, fields={"kernel_size": 3})
            before = d.given("state_1", "num_states", HEADS, DIM, DIM, dtype="float32",
                             kind="state")
            decay = d.node("GemmBiasAct", [normed, d.weight("decay", HEADS, HIDDEN)],
                           ("decay", HEADS), fields={"activation": "softplus"})
            rate = d.weight("rate", HEADS)
            weights["rate"] = -np.abs(weights["rate"])  # states decay
            normed = d.node("GatedLinearAttention",
                            [qkv, decay, before, cu, past, -1, d.weight("skip", HEADS), slots,
                             rate],
                            ("kept", HEADS * DIM), in_place=1, fields={
                                "num_k_heads": 1, "num_v_heads": HEADS, "k_head_dim": DIM,
                                "v_head_dim": DIM})
            qkv = d.node("GemmBiasAct", [normed, d.weight("more", (HEADS + 2) * DIM, HIDDEN)],
                         ("more", (HEADS + 2) * DIM))
        caches = [d.given(f"{kind}_cache_{layer}", "num_blocks", 1, "block_size", DIM,
                          dtype="float32", kind="cache") for kind in ("key", "value")]
        rotary = [d.weight(name, LENGTH, DIM // 2) for name in ("cos", "sin")]
        seen = d.node("CausalAttention",
                      [qkv, *caches, cu, past, *rotary, d.weight("q_norm", DIM), -1, blocks],
                      (f"{layer}.seen", HEADS * DIM), in_place=2,
                      fields={**ATTENTION, "rotary_dim": DIM, "window": 4})
        if layer == 0:
            query = d.node("GemmBiasAct", [seen, d.weight("q", HEADS * DIM, HEADS * DIM)],
                           ("query", HEADS * DIM))
            memory = [d.given(f"memory_{kind}_0", "num_memory_tokens", DIM, dtype="float32",
                              kind="memory") for kind in ("key", "value")]
            seen = d.node("BidirectionalAttention",
                          [query, *memory, cu, d.given("memory_starts", "batch"),
                           d.given("encoder_sequence_length", "batch")],
                          ("read", HEADS * DIM), fields=ATTENTION)
        out = d.node("GemmBiasRes", [seen, d.weight(f"{layer}.o", HIDDEN, HEADS * DIM), -1, x],
                     (f"{layer}.out", HIDDEN))
        normed = d.node("AddRMSNorm", [out, x, d.weight(f"{layer}.norm", HIDDEN)],
                        (f"{layer}.normed", HIDDEN), (f"{layer}.sum", HIDDEN))
        inner = d.node("GatedMLP", [normed, d.weight(f"{layer}.gates", 2 * INNER, HIDDEN)],
                       (f"{layer}.inner", INNER))
        x = d.node("GemmBiasRes", [inner, d.weight(f"{layer}.down", HIDDEN, INNER), -1, normed + 1],
                   (f"{layer}.x", HIDDEN))
        normed = x
    chosen = d.node("Gather", [x, d.given("logits_indices", "num_logits", dtype="int64")],
                    ("chosen", HIDDEN), logits=True)
    scores = d.node("NormGemm", [chosen, d.weight("head", PADDED, HIDDEN), -1,
                                 d.weight("head.row_sums", PADDED)], ("scores", PADDED),
                    fields={"centred": 1}, logits=True)
    halved = d.node("Mul", [scores, d.weight("half", 1)], ("halved", PADDED), logits=True)
    return d.finish(d.node("Tanh", [halved], ("logits", PADDED), logits=True))


def write_case(directory: Path, *, states: bool = True) -> Path:
    """Write the case directory, optionally of a model with recurrent states."""
    chip = directory / "chip0"
    chip.mkdir(parents=True)
    weights: dict[str, np.ndarray] = {}
    schedules = {"schedule.json": decoder(weights, states), "encoder.json": encoder(weights)}
    for name, schedule in schedules.items():
        (chip / name).write_text(json.dumps(schedule))
    save_file(weights, chip / "weights.safetensors")
    files = tuple(FileEntry(path=f"chip0/{path.name}", size=path.stat().st_size,
                            sha256=hash_file(path)) for path in sorted(chip.iterdir()))
    used = {node["op"] for schedule in schedules.values() for node in schedule["nodes"]}
    write_manifest(Manifest(
        format_version=FORMAT_VERSION, kv_cache_layout="paged", llmc_version="0", source=Source(
            kind="onnx", architecture="Small", config_sha256="0" * 64),
        dims=Dims(num_layers=LAYERS, hidden_size=HIDDEN, num_heads=HEADS, num_kv_heads=1,
                  head_dim=DIM, vocab_size=VOCAB, padded_vocab_size=PADDED, max_seq_len=LENGTH),
        encoder=EncoderInfo(num_layers=1, max_seq_len=LENGTH, vocab_size=VOCAB,
                            decoder_start_token_id=1, forced_eos_token_ids=(2,),
                            bad_words=((3, 4),)),
        dtype="float32", tp_size=1, device_groups=((0,), (1,)),
        target=Target(kind="cuda", compute_capability="9.0"),
        ops={name: plugins.registry()[name].version for name in sorted(
            used & {*plugins.registry()})},
        tokenizer=TokenizerInfo(path=None, bos_token_id=1, eos_token_ids=(2,), chat_template=None),
        chips=(_chip(schedules, sum(array.nbytes for array in weights.values()), states),),
        passes=(), files=files), directory)
    return directory


def _chip(schedules: Mapping[str, dict], weight_bytes: int, keeps: bool) -> Chip:
    def listed(name: str) -> tuple[TensorInfo, ...]:
        return tuple(TensorInfo(name=t["name"], dtype=t["dtype"], shape=tuple(t["shape"]))
                     for t in schedules[name]["tensors"]
                     if t["kind"] in ("input", "cache", "state", "memory")
                     and t["name"] != "memory_rows"
                     and not (name == "encoder.json" and t["kind"] == "memory"))

    def step(name: str, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> GraphStep:
        return GraphStep(path=f"chip0/{name}", inputs=tuple(t.name for t in inputs),
                         outputs=tuple(t.name for t in outputs))

    inputs, given = listed("schedule.json"), listed("encoder.json")
    outputs = (TensorInfo(name="logits", dtype="float32", shape=("num_logits", PADDED)),
               *(t.model_copy(update={"name": f"{t.name}_out"}) for t in inputs
                 if "_cache_" in t.name or t.name[:-1] == "state_"))
    memory = tuple(TensorInfo(name=f"memory_{kind}_0", dtype="float32", shape=("num_tokens", DIM))
                   for kind in ("key", "value"))
    return Chip(rank=0, path="chip0", inputs=inputs, outputs=outputs,
                steps=(step("schedule.json", inputs, outputs),),
                cache=(LayerCache(num_kv_heads=1, head_dim=DIM),) * LAYERS,
                num_heads=(HEADS,) * LAYERS,
                states=(StateCache(shape=(2, (HEADS + 2) * DIM)),
                        StateCache(shape=(HEADS, DIM, DIM))) if keeps else (),
                weight_bytes=weight_bytes,
                encoder=EncoderProgram(inputs=given, outputs=memory,
                                       steps=(step("encoder.json", given, memory),)))
