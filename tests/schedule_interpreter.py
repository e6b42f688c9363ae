"""NumPy interpreter of CUDA programs, in an arena that tracks the owner of each byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import llmc
from llmc import plugins
from llmc.artifacts.adapter import Matrices
from llmc.artifacts.manifest import INPUT_FEATURES, Manifest, read_manifest, verify_files
from llmc.artifacts.program import (
    Program,
    ProgramTensor,
    read_chip_programs,
    read_image_program,
)
from llmc.plugins.activations import REFERENCE as ACTIVATIONS
from llmc.runtime.collectives import Communicator
from llmc.runtime.core import llm as llm_module
from llmc.runtime.core.step import (
    LAST,
    EncoderInput,
    EncoderOutputs,
    EngineLimits,
    Step,
    StepOutput,
)
from llmc.runtime.engines.cuda import extension, lora_limits, step_arrays
from llmc.runtime.engines.host import HostSampling
from llmc.runtime.engines.image_encoder import DividedImageEncoder, ImageEncoder
from llmc.runtime.engines.media_encoders import MediaEncoders
from llmc.runtime.engines.state_slots import StateSlots
from llmc.runtime.speculation.ngram import NgramDrafter

_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
           "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "int64": np.int64, "int32": np.int32}
_COLLECTIVES = {"AllReduce": "all_reduce", "AllGather": "all_gather"}
_ELEMENTWISE = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide,
                "Min": np.minimum, "Max": np.maximum, "Tanh": np.tanh, "Exp": np.exp,
                "Sigmoid": lambda x: 1 / (1 + np.exp(-x)), "Neg": np.negative,
                "Softplus": lambda x: np.logaddexp(x, 0),
                "Gelu": ACTIVATIONS["gelu"],
                "GeluTanh": ACTIVATIONS["gelu_tanh"], "Greater": np.greater, "Less": np.less,
                "Elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
                "Where": lambda chosen, x, y: np.where(chosen != 0, x, y)}
_GUARD, _POISON = 64, 0xA5
# Blocks are small, so that few tokens take several, and in an unusual order.
LIMITS = EngineLimits(num_blocks=512, block_size=4, max_tokens=4096, max_slots=64, max_logits=512,
                ahead=1)
_TABLE = [block * 37 % LIMITS.num_blocks for block in range(LIMITS.num_blocks)]


def _one(tokens: Sequence[int], past: int, **others: object) -> Step:
    """Return a step of one sequence with all logits."""
    return Step.of([tokens], [past], [_TABLE], [0], logits="all", **others)


class Arena:
    """Memory for the values of a step of `count` tokens or logits, between two guards.

    A token or logit has `row_bytes` bytes.
    """

    def __init__(self, row_bytes: int, count: int) -> None:
        self.count = count
        self.bytes = np.full(row_bytes * count + 2 * _GUARD, _POISON, np.uint8)
        self.owners = np.full(len(self.bytes), -1)

    def _place(self, tensor: ProgramTensor) -> slice:
        start = _GUARD + tensor.offset * self.count
        stop = start + np.dtype(_DTYPES[tensor.dtype]).itemsize * self.count * tensor.shape[1]
        assert start >= _GUARD and stop <= len(self.bytes) - _GUARD, f"{tensor.name} is outside"
        return slice(start, stop)

    def write(self, number: int, tensor: ProgramTensor, value: np.ndarray) -> None:
        place = self._place(tensor)
        rows = self.bytes[place].view(_DTYPES[tensor.dtype]).reshape(self.count, tensor.shape[1])
        assert value.shape == rows.shape, f"{tensor.name} is {value.shape}, not {rows.shape}"
        rows[:] = value
        self.owners[place] = number

    def read(self, number: int, tensor: ProgramTensor) -> np.ndarray:
        place = self._place(tensor)
        assert (self.owners[place] == number).all(), f"{tensor.name} is not there any more"
        return self.bytes[place].view(_DTYPES[tensor.dtype]).reshape(self.count, tensor.shape[1])

    def check_guards(self) -> None:
        assert (self.bytes[:_GUARD] == _POISON).all() and (self.bytes[-_GUARD:] == _POISON).all()


class Interpreter:
    """NumPy interpreter of a program; each value is rounded to the model's dtype.

    Values are in one buffer at the program's offsets. Access outside it, or to an overwritten
    value, is an error. Unused cache entries are NaN.
    """

    def __init__(self, case: Path, rank: int = 0, communicator: Communicator | None = None,
                 limits: EngineLimits = LIMITS) -> None:
        self.rank, self.communicator, self.loops = rank, communicator, False
        self.manifest = read_manifest(case)
        verify_files(self.manifest, case, hashes=False)
        chip = self.manifest.chips[rank]
        program = read_chip_programs(self.manifest, chip, case)
        self.schedule, self.encoder = program.model, program.encoder
        self.drafts = program.drafts if limits.proposes else []
        self.draft = self.drafts[0] if self.drafts else None
        programs = [self.schedule, *self.drafts]
        self.dtype = np.dtype(_DTYPES[self.manifest.dtype])
        self.weights = load_file(case / f"chip{rank}" / "weights.safetensors")
        self.limits = limits
        sizes = {"num_blocks": limits.num_blocks + 1,  # one for padding
                 "block_size": limits.block_size}
        self.caches = {t.name: np.full([sizes.get(dim, dim) for dim in t.shape], np.nan,
                                       _DTYPES[t.dtype])
                       for own in programs for t in own.tensors if t.kind == "cache"}
        self.features: np.ndarray | None = None  # of the last step's tokens, for the draft model
        self.origins: dict[int, int] = {}  # by slot, the first position after admission
        self.carried: dict[tuple[int, int], np.ndarray] = {}  # by layer of the draft model and slot
        self.states = {t.name: np.full((limits.max_slots, *t.shape[1:]), np.nan, np.float32)
                       for t in self.schedule.tensors if t.kind == "state"}
        self.slots = StateSlots(limits)
        slots = lora_limits(chip, limits)
        self.adapters = {t.name: np.zeros([slots.get(dim, dim) for dim in t.shape],
                                          _DTYPES[t.dtype])
                         for t in self.schedule.tensors if t.kind == "adapters"}
        self.mem_max_seq_len = self.manifest.mem_max_seq_len
        rows = max(64, limits.max_slots * self.mem_max_seq_len)
        self.memory = {t.name: np.zeros((rows, t.shape[1]), self.dtype)
                       for t in self.schedule.tensors if t.kind == "memory"}

    def encode(self, source: EncoderInput, start: int) -> EncoderOutputs:
        """Run the encoder; its output is stored in rows from `start` on."""
        assert self.encoder is not None
        reads = {INPUT_FEATURES: source.astype(self.dtype)} if isinstance(source, np.ndarray) \
            else {}
        self._run(self.encoder, _one([0] * len(source) if reads else list(source), 0),
                  {"memory_rows": np.arange(start, start + len(source)), **reads})
        return EncoderOutputs.of([start], [len(source)])

    def run(self, tokens: Sequence[int], past: int,
            memory: EncoderOutputs | None = None) -> np.ndarray:
        """Return logits [num_tokens, vocab_size] of tokens after `past` others."""
        return self.compute(_one(tokens, past, memory=memory))

    def compute(self, step: Step) -> np.ndarray:
        """Return logits [num_logits, vocab_size].

        `memory` in the step counts rows of one token, unless the step is of a loop, which encodes.
        """
        if self.loops and step.memory is not None:
            for row, source in step.encode.items():
                self.encode(source, row * self.mem_max_seq_len)
            step = replace(step, encode={}, memory=EncoderOutputs(
                step.memory.first_rows(self.mem_max_seq_len),
                step.memory.encoder_sequence_length))
        assert not step.encode, "the encoder is run by itself"
        for slot, adapter in step.load_adapters.items():
            self._load(slot, adapter.matrices[self.rank])
        for cache in self.caches.values():
            for source, target in step.copies:
                cache[target] = cache[source]
        name = self.schedule.tensors[self.schedule.logits].name
        values = self.trace(step)
        if self.schedule.features >= 0:
            self.features = values[self.schedule.tensors[self.schedule.features].name]
        return values[name][:, :self.manifest.dims.vocab_size]

    def _load(self, slot: int, matrices: Matrices) -> None:
        """Load an adapter; what it does not need of its slot stays."""
        for name in self.adapters:
            if name.endswith("lora_ranks"):
                self.adapters[name][slot] = 0
        for layer, pair in matrices.items():
            down, up = (matrix.view(self.dtype) for matrix in pair)
            rank = up.shape[1]
            self.adapters[f"{layer}.lora_down"][:, slot, :rank] = down
            self.adapters[f"{layer}.lora_up"][slot, :, :rank] = up
            self.adapters[f"{layer}.lora_ranks"][slot] = rank

    def pool(self, step: Step) -> list[np.ndarray]:
        """Return `StepOutput.pooled`."""
        assert self.manifest.pooling is not None
        rows = self.trace(step)[self.schedule.tensors[self.schedule.logits].name]
        each = np.split(rows, step.cu_seqlens[1:-1]) if self.manifest.pooling.per_token else rows
        return [each[index] for index in step.sample]

    def propose(self, step: Step, output: StepOutput) -> np.ndarray:
        """Return `StepOutput.drafts` by the passes and kernels of csrc/engine/drafter.h."""
        assert self.draft is not None and step.propose is not None
        ids, sampled, firsts, _, tables = (np.array(own, np.int64) for own in
                                           extension().draft_rows(*step_arrays(step)))
        counts = np.ones(len(firsts), np.int64) if output.counts is None else output.counts
        chosen, last = output.tokens[np.cumsum(counts) - 1], firsts + counts - 1
        assert all(sampled[row] == index for index, row in enumerate(last))
        assert self.manifest.draft is not None
        if self.manifest.draft.chain == "block":
            return self._propose_block(step, firsts, counts, chosen, tables)
        if len(self.drafts) > 1:
            return self._propose_by_layers(step, ids, firsts, counts, chosen, tables)
        back = int(self.manifest.draft.chain == "position")  # all passes are at the last position
        shifted = self.draft.hidden >= 0 and not back
        ids[last] = np.maximum(chosen, 0)
        ends = step.position_ids[last] + 1
        longest, padding = self.manifest.dims.max_seq_len, self.limits.num_blocks
        ends[(chosen < 0) | (ends >= longest)] = -1
        draws = shifted and step.propose > 0
        values = {} if back else self._pass(
            step, ids if shifted else step.token_ids, last if draws else last[:0], self.features)
        drafts = np.full((len(last), step.propose), -1, np.int64)
        tokens, hidden = np.maximum(chosen, 0), self.features if back else values.get("hidden_out")
        hidden = hidden[last] if hidden is not None else None
        if draws:
            tokens = self._draft_ids(values)
            drafts[:, 0] = np.where(ends >= 0, tokens, -1)
        table = np.where((ends[:, None] >= 0) & (step.block_tables[tables] >= 0),
                         step.block_tables[tables], padding)
        for index in range(int(draws), step.propose if len(last) else 0):
            past = np.clip(ends - back, 0, longest - 1)
            one = Step.of([[token] for token in tokens.tolist()], past.tolist(), table.tolist(),
                          range(len(last)))
            values = self._pass(one, tokens, np.arange(len(last)), hidden)
            tokens, hidden = self._draft_ids(values), values.get("hidden_out")
            fits = (ends >= 0) & (ends < longest)
            drafts[:, index] = np.where(fits, tokens, -1)
            ends = ends + (fits if not back else 0)
        return drafts

    def _propose_by_layers(self, step: Step, ids: np.ndarray, firsts: np.ndarray,
                           counts: np.ndarray, chosen: np.ndarray,
                           tables: np.ndarray) -> np.ndarray:
        """`propose` by several layers, as csrc/kernels/sampling/draft_layers.h."""
        assert step.propose is not None and self.features is not None
        for index, slot in enumerate(step.slots.tolist()):
            if slot in step.admit:
                self.origins[slot] = int(step.past_lens[index])
        lags = step.past_lens - [self.origins[slot] for slot in step.slots.tolist()]
        last, longest, padding = firsts + counts - 1, self.manifest.dims.max_seq_len, \
            self.limits.num_blocks
        ids[last] = np.maximum(chosen, 0)
        ends = step.position_ids[last] + 1
        ends[(chosen < 0) | (ends >= longest)] = -1
        drafts = np.full((len(last), step.propose), -1, np.int64)
        table = np.where((ends[:, None] >= 0) & (step.block_tables[tables] >= 0),
                         step.block_tables[tables], padding)
        values = self._pass(step, ids, last if step.propose else last[:0], self.features)
        if step.propose:
            drafts[:, 0] = np.where(ends >= 0, self._draft_ids(values), -1)
        count = len(self.drafts)
        tail: np.ndarray | None = None
        for layer in range(1, count):
            out = values["hidden_out"]
            hidden, lagged = np.empty_like(out), np.zeros_like(ids)
            behind = np.minimum(layer, lags)
            before = np.minimum(layer - 1, lags)
            carried = dict(self.carried)
            for index, slot in enumerate(step.slots.tolist()):
                start, end = step.cu_seqlens[index:index + 2].tolist()
                moves = int(behind[index] - before[index])
                for row in range(start, end):
                    hidden[row] = self.carried[layer, slot] if moves and row == start \
                        else out[row - moves]
                    source = row + layer - int(behind[index])
                    lagged[row] = ids[source] if source < end else 0
                place = np.flatnonzero(step.sample == index)
                final = int(last[place[0]]) if len(place) else end - 1
                row = final - (layer - 1 - int(before[index]))
                if row >= start:
                    carried[layer, slot] = out[row].copy()
            self.carried = carried
            tokens = replace(step, past_lens=(step.past_lens - behind).astype(np.int32))
            values = self._pass(tokens, lagged, last[:0], hidden, layer)
            if layer < step.propose and len(last):
                tail = self._run_tail(step, layer, ends, table, drafts, tail)
        for index in range(count, step.propose if len(last) else 0):
            assert tail is not None
            past = np.clip(ends, 0, longest - 1)
            one = Step.of([[max(token, 0)] for token in drafts[:, index - 1].tolist()],
                          past.tolist(), table.tolist(), range(len(last)))
            values = self._pass(one, one.token_ids, np.arange(len(last)), tail, count - 1)
            tail, fits = values["hidden_out"], (ends >= 0) & (ends < longest)
            drafts[:, index] = np.where(fits, self._draft_ids(values), -1)
            ends = ends + fits
        return drafts

    def _run_tail(self, step: Step, layer: int, ends: np.ndarray, table: np.ndarray,
                  drafts: np.ndarray, before: np.ndarray | None) -> np.ndarray:
        """Run a layer on the rows whose tokens are drafts, and add a draft; return hidden_out.

        Before the last layer it is that of all rows, else of the last row of each sequence.
        """
        slots = step.slots[step.sample].tolist()
        rows, hidden = [], []
        for index, slot in enumerate(slots):
            for place in range(layer):
                position = int(ends[index]) - layer + place
                there = ends[index] >= 0 and position >= self.origins[slot]
                rows.append((max(int(drafts[index, place]), 0), position, table[index]) if there
                            else (0, 0, np.full_like(table[index], self.limits.num_blocks)))
                assert self.features is not None
                hidden.append(np.zeros_like(self.features[0]) if not there else
                              self.carried[layer, slot] if place == 0 else
                              before[index * (layer - 1) + place - 1])  # type: ignore[index]
        tail = Step.of([[token] for token, _, _ in rows], [position for _, position, _ in rows],
                       [own.tolist() for _, _, own in rows], range(len(rows)))
        values = self._pass(tail, tail.token_ids, np.arange(len(rows)), np.stack(hidden), layer)
        ends_of = np.arange(len(slots)) * layer + layer - 1
        drafts[:, layer] = np.where(ends >= 0, self._draft_ids(
            {"logits": values["logits"][ends_of]}), -1)
        out = values["hidden_out"]
        return out[ends_of] if layer == len(self.drafts) - 1 else out

    def _propose_block(self, step: Step, firsts: np.ndarray, counts: np.ndarray,
                       chosen: np.ndarray, tables: np.ndarray) -> np.ndarray:
        """`propose` in one pass, after one that writes the keys of the step's tokens."""
        info, last = self.manifest.draft, firsts + counts - 1
        assert info is not None and info.max_drafts and step.propose is not None
        self._pass(step, step.token_ids, last[:0], self.features)
        drafts = np.full((len(last), step.propose), -1, np.int64)
        if not len(last) or not step.propose:
            return drafts
        size, ends = 1 + info.max_drafts, step.position_ids[last] + 1
        fits = (chosen >= 0) & (ends + size <= self.manifest.dims.max_seq_len)
        table = np.where(fits[:, None] & (step.block_tables[tables] >= 0),
                         step.block_tables[tables], self.limits.num_blocks)
        masks = [info.mask_token_id or 0] * info.max_drafts
        tokens = [[max(token, 0), *masks] for token in chosen.tolist()]
        block = Step.of(tokens, np.where(fits, ends, 0).tolist(), table.tolist(), range(len(last)))
        rows = np.arange(size * len(last)).reshape(-1, size)[:, 1:].ravel()
        assert self.features is not None
        found = self._draft_ids(self._pass(
            block, block.token_ids, rows,
            np.zeros((block.num_tokens, self.features.shape[1]), self.features.dtype)))
        drafts[fits] = found.reshape(len(last), -1)[fits, :step.propose]
        return drafts

    def _pass(self, step: Step, ids: np.ndarray, logits_indices: np.ndarray,
              hidden: np.ndarray | None, layer: int = 0) -> dict[str, np.ndarray]:
        """Run the draft model or a layer of it; return its logits and hidden_out by name."""
        draft = self.drafts[layer]
        values = self._run(draft, step, {"input_ids": ids, "logits_indices": logits_indices},
                           hidden)
        numbers = {"logits": draft.logits, "hidden_out": draft.hidden_out}
        return {name: values[draft.tensors[number].name] for name, number in numbers.items()
                if number >= 0 and draft.tensors[number].name in values}

    def _draft_ids(self, values: dict[str, np.ndarray]) -> np.ndarray:
        info = self.manifest.draft
        assert info is not None
        columns = values["logits"][:, :info.vocab_size].argmax(1)
        return self.weights["draft.token_ids"][columns] if info.reduced else columns

    def greedy(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the greedy continuation of a prompt."""
        known = list(tokens)
        logits = self.run(known, 0)
        while len(known) < len(tokens) + count:
            known.append(int(logits[-1].argmax()))
            logits = self.run(known[-1:], len(known) - 1)
        return tuple(known[len(tokens):])

    def trace(self, step: Step) -> dict[str, np.ndarray]:
        """As `CudaEngine.trace`."""
        return self._run(self.schedule, step, {} if step.memory is None else {
            "memory_starts": step.memory.rows,
            "encoder_sequence_length": step.memory.encoder_sequence_length})

    def _run(self, schedule: Program, step: Step, inputs: dict[str, np.ndarray],
             hidden: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Run a program.

        Args:
            inputs: those that are absent from the step, or differ.
            hidden: features for a draft model.
        """
        inputs = {"input_ids": step.token_ids, "position_ids": step.position_ids,
                  "cu_seqlens": step.cu_seqlens, "past_lens": step.past_lens,
                  "commit_lens": step.commit_lens,
                  "logits_indices": step.logits_indices, "block_table": step.block_tables,
                  "lora_ids": step.lora_ids, "lora_logits_ids": step.lora_ids[step.logits_indices],
                  "embeds": step.embeds.astype(self.dtype), "embed_ids": step.embed_ids,
                  **{f"deep_embeds_{index}": rows.astype(self.dtype)
                     for index, rows in enumerate(step.deep_embeds)},
                  "rotary_positions": step.rotary_positions if len(step.rotary_positions)
                  else np.repeat(step.position_ids[:, None], 3, axis=1),
                  "bidirectional_ranges": step.bidirectional_ranges
                  if len(step.bidirectional_ranges)
                  else np.zeros((len(step.token_ids), 2), np.int32),
                  "token_type_ids": step.token_type_ids if len(step.token_type_ids)
                  else np.zeros_like(step.token_ids), **inputs}
        if self.states and not any(schedule is own for own in self.drafts):
            inputs["state_slots"], copies = self.slots.place(step)
            for state in self.states.values():
                state[copies[:, 1]] = state[copies[:, 0]]
        sizes = {"num_tokens": step.num_tokens, "num_logits": len(inputs["logits_indices"])}
        arenas = {False: Arena(schedule.token_bytes, sizes["num_tokens"]),
                  True: Arena(schedule.logit_bytes, step.batch_size if self.manifest.pooling
                              else sizes["num_logits"])}
        decode = sizes["num_tokens"] == sizes["num_logits"] == step.batch_size
        moved: dict[int, int] = {}  # values that alias another value's memory
        kept: dict[str, np.ndarray] = {}

        if schedule.hidden >= 0:
            assert hidden is not None
            arenas[False].write(schedule.hidden, schedule.tensors[schedule.hidden], hidden)

        def read(number):
            number = moved.get(number, number)
            tensor = schedule.tensors[number]
            known = {"weight": self.weights, "cache": self.caches, "state": self.states,
                     "memory": self.memory, "adapters": self.adapters}.get(tensor.kind)
            if tensor.kind == "input":
                return inputs[tensor.name]
            if tensor.kind == "columns":
                return read(tensor.of)[:, tensor.first:tensor.first + tensor.width]
            return arenas[tensor.per_logit].read(number, tensor) if known is None \
                else known[tensor.name]

        for node in schedule.nodes:
            if not sizes["num_logits"] and node.outputs and \
                    schedule.tensors[node.outputs[0]].per_logit and \
                    any(schedule is own for own in self.drafts):
                continue
            if (node.op == "InputEmbeds" and not len(step.embed_ids)) or \
                    (node.op == "AddEmbeds" and not len(step.deep_embeds)):
                moved[node.outputs[0]] = moved.get(node.inputs[0], node.inputs[0])
                continue
            if node.op == "Gather":
                results = [read(node.inputs[0])[read(node.inputs[1])]]
                if decode:
                    moved[node.outputs[0]] = moved.get(node.inputs[0], node.inputs[0])
            elif node.op == "Columns":
                results = [read(node.inputs[0])[:, read(node.inputs[1])]]
            elif node.op == "Concat":
                results = [np.concatenate([read(number) for number in node.inputs], -1)]
            elif node.op == "Scatter":
                read(node.inputs[2])[read(node.inputs[1])] = read(node.inputs[0])
                results = []
            elif node.op in _ELEMENTWISE:
                results = [_ELEMENTWISE[node.op](*(read(number).astype(np.float32)
                                                   for number in node.inputs))]
            elif node.op in _COLLECTIVES:
                assert self.communicator is not None
                collective = getattr(self.communicator, _COLLECTIVES[node.op])
                results = [collective(self.rank, read(node.inputs[0]).copy())]
            else:
                op = plugins.registry()[node.op]
                given = {name: read(number) for name, number
                         in zip(op.input_names, node.inputs, strict=False) if number >= 0}
                results = op.reference(op.complete(node.fields), given)
            for number, result in zip(node.outputs, results, strict=True):
                if number >= 0:
                    tensor = schedule.tensors[number]
                    arenas[tensor.per_logit].write(number, tensor, result)
                    if tensor.dtype != "float8_e4m3fn":
                        kept[tensor.name] = arenas[tensor.per_logit].read(number, tensor) \
                            .astype(np.float32)
            held = [{**self.caches, **self.states}.get(schedule.tensors[number].name)
                    for number in node.inputs if number >= 0]
            for array, result in zip((own for own in held if own is not None), results[1:],
                                     strict=False):
                array[:] = result
        for arena in arenas.values():
            arena.check_guards()
        return kept


def run_image_program(program: Program, weights: Mapping[str, np.ndarray],
                inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run the program of an image encoder; return its outputs in float32.

    Args:
        program: the program.
        weights: by name.
        inputs: by name.
    """
    sizes = {name: [len(array) for own, array in inputs.items() if own.startswith(name)]
             for name in ("patches", "merged_rows")}
    arenas = {False: Arena(program.token_bytes, sizes["patches"][0]),
              True: Arena(program.logit_bytes, (sizes["merged_rows"] or [0])[0])}

    def read(number: int) -> np.ndarray:
        tensor = program.tensors[number]
        if tensor.kind == "input":
            return inputs[tensor.name].astype(_DTYPES[tensor.dtype])
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


def interpreted_image_encoder(manifest: Manifest, case: Path, threads: int = 2,
                              device: int = 0) -> ImageEncoder:
    """The image encoder of a case for GPUs, with an interpreter of its program if it has one."""
    assert manifest.image is not None
    if len(manifest.image.steps) == 1:
        return ImageEncoder(manifest, case, threads)
    program, _ = read_image_program(manifest, case)
    weights = load_file(case / "chip0" / "weights.safetensors")
    return DividedImageEncoder(manifest, case, threads,
                               partial(run_image_program, program, weights))


class Interpreters:
    """Interpreters of all ranks, in the place of a `Replica`."""

    def __init__(self, case: Path, limits: EngineLimits = LIMITS) -> None:
        count = read_manifest(case).tp_size
        self.communicator = communicator = Communicator(count)
        self.limits = limits
        self.ranks = [Interpreter(case, rank, communicator, limits) for rank in range(count)]
        manifest = self.ranks[0].manifest
        self.media = None if not manifest.media else MediaEncoders(
            manifest, case, 2, None if manifest.image is None else
            interpreted_image_encoder(manifest, case))

    def _on_all(self, work: Callable[[Interpreter], Any]) -> list[Any]:
        def guarded(rank: Interpreter) -> Any:
            try:
                return work(rank)
            except BaseException:  # the others may wait for this rank
                self.communicator.abort()
                raise

        with ThreadPoolExecutor(len(self.ranks)) as threads:
            return list(threads.map(guarded, self.ranks))

    def compute(self, step: Step) -> np.ndarray:
        if self.media is not None:
            step = self.media.fill(step).without_media()
        return self._on_all(lambda rank: rank.compute(step))[0]

    def pool(self, step: Step) -> list[np.ndarray]:
        return self._on_all(lambda rank: rank.pool(step))[0]

    def propose(self, step: Step, output: StepOutput) -> np.ndarray:
        return self._on_all(lambda rank: rank.propose(step, output))[0]

    def trace(self, step: Step) -> list[dict[str, np.ndarray]]:
        return self._on_all(lambda rank: rank.trace(step))

    def greedy(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        return self._on_all(lambda rank: rank.greedy(tokens, count))[0]

    def close(self) -> None:
        """Do nothing."""


class DraftsAhead(HostSampling):
    """Resolves the drafts of steps in flight, as prepare_inputs of csrc/kernels/sampling does."""

    def __init__(self, ranks: Interpreters, limits: EngineLimits) -> None:
        by_model = limits.proposes and not limits.prompt_lookup
        super().__init__(ranks, limits, ranks.propose if by_model else None, ranks.pool)
        self._lengths: dict[int, int] = {}  # by slot
        self._drafts: dict[int, list[int]] = {}
        self._looks_up: dict[int, bool] = {}
        self.resolved = 0

    def submit(self, step: Step) -> int:
        token_ids, past_lens = step.token_ids.copy(), step.past_lens.copy()
        rotary_positions = step.rotary_positions.copy()
        self._looks_up.update((slot, state.prompt_lookup) for slot, state in step.admit.items())
        for index, slot in enumerate(step.slots.tolist()):
            own = slice(*step.cu_seqlens[index:index + 2].tolist())
            token_ids[own] = [max(self._drafts[slot][-2 - token], 0) if token < LAST else token
                              for token in token_ids[own].tolist()]
            if len(step.unread) and step.unread[index]:
                past, self.resolved = int(past_lens[index]), self.resolved + 1
                past_lens[index] = self._lengths[slot]
                assert past - step.unread[index] <= past_lens[index] <= past
                rotary_positions[own] -= past - past_lens[index]
        known = replace(step, token_ids=token_ids, past_lens=past_lens,
                        rotary_positions=rotary_positions)
        ticket = super().submit(known)
        if self.limits.prompt_lookup and step.propose:
            self._outputs[ticket] = self._look_up(step, self._outputs[ticket])
        output = self._outputs[ticket]
        counts = [1] * len(step.sample) if output.counts is None else output.counts.tolist()
        for place, (index, count) in enumerate(zip(step.sample.tolist(), counts, strict=True)):
            slot = int(step.slots[index])
            drafts = int(step.num_drafts[index]) if len(step.num_drafts) else 0
            self._lengths[slot] = int(past_lens[index] + step.seq_lens[index]) - drafts + count - 1
            if output.drafts is not None:
                self._drafts[slot] = output.drafts[place].tolist()
        return ticket

    def _look_up(self, step: Step, output: StepOutput) -> StepOutput:
        """Draft by prompt lookup, as csrc/kernels/sampling/lookup.h."""
        assert step.propose is not None
        drafts = np.full((len(step.sample), step.propose), -1, np.int64)
        matches = np.zeros(len(step.sample), np.int32)
        for place, slot in enumerate(step.slots[step.sample].tolist()):
            sampler = self._samplers.get(slot)
            if sampler is None or not self._looks_up[slot]:
                continue
            drafter = NgramDrafter(sampler.prompt.tolist())
            drafter.extend(self._tokens[slot])
            found = drafter.draft(step.propose)
            if found is not None:
                drafts[place], matches[place] = found.tokens, found.match
        return replace(output, drafts=drafts, matches=matches)


@contextmanager
def interpreted(case: Path, limits: EngineLimits, **options: Any) -> Iterator[llmc.LLM]:
    """Return an LLM of a case for GPUs with interpreters as engines.

    Args:
        options: keyword arguments of `llmc.LLM`.
    """
    ranks = Interpreters(case, limits)
    for rank in ranks.ranks:
        rank.loops = True
    engine = DraftsAhead(ranks, limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "find_devices", lambda *_: [None])
        patch.setattr(llm_module, "load_replica", lambda *_: engine)
        llm = llmc.LLM(case, max_num_batched_tokens=limits.max_tokens,
                       max_batch_size=limits.max_slots, **options)
    with llm:
        yield llm
