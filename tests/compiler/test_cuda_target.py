"""The CUDA target's schedule, run here with the ops' references in the places that it gives."""

import families
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import llmc
from llmc import plugins
from llmc.compiler.diff import diff
from llmc.runtime.inspection import summarize
from llmc.runtime.manifest import read_manifest
from llmc.runtime.schedule import read_schedule

ELEMENTWISE = {"Add": np.add, "Mul": np.multiply, "Div": np.divide, "Tanh": np.tanh}


class Interpreter:
    """A schedule on NumPy, one sequence at a time, float32.

    Values lie in one buffer at the schedule's offsets, so a plan that lets two living values share
    memory gives wrong logits.
    """

    def __init__(self, case):
        self.manifest = read_manifest(case)
        self.schedule = read_schedule(case / self.manifest.chips[0].steps[0].path)
        self.weights = load_file(case / "chip0" / "weights.safetensors")
        self.caches = {t.name: np.zeros((1, *t.shape[1:]), np.float32)
                       for t in self.schedule.tensors if t.kind == "cache"}

    def run(self, tokens, past):
        count = len(tokens)
        inputs = {"input_ids": np.array(tokens), "position_ids": np.arange(past, past + count),
                  "cu_seqlens": np.array([0, count]), "past_lens": np.array([past]),
                  "logits_indices": np.arange(count)}
        arenas = {False: np.full(self.schedule.token_bytes * count, 255, np.uint8),
                  True: np.full(self.schedule.logit_bytes * count, 255, np.uint8)}

        def view(number):
            tensor = self.schedule.tensors[number]
            start = tensor.offset * count
            return arenas[tensor.per_logit][start:start + 4 * count * tensor.shape[-1]] \
                .view(np.float32).reshape(count, -1)

        def read(number):
            tensor = self.schedule.tensors[number]
            known = {"input": inputs, "weight": self.weights, "cache": self.caches}.get(tensor.kind)
            return view(number) if known is None else known[tensor.name]

        for node in self.schedule.nodes:
            if node.op == "Gather":
                view(node.outputs[0])[:] = read(node.inputs[0])[read(node.inputs[1])]
                continue
            if node.op in ELEMENTWISE:
                view(node.outputs[0])[:] = ELEMENTWISE[node.op](*map(read, node.inputs))
                continue
            op = plugins.registry()[node.op]
            given = {name: read(number) for name, number
                     in zip(op.input_names, node.inputs, strict=False) if number >= 0}
            results = op.reference(node.fields, given)
            for number, result in zip(node.outputs, results, strict=True):
                if number >= 0:
                    view(number)[:] = result
            if node.op == "Attention":
                for number, result in zip(node.inputs[1:3], results[1:], strict=True):
                    self.caches[self.schedule.tensors[number].name][:] = result
        return view(self.schedule.logits)[:, :self.manifest.dims.vocab_size].copy()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gpt_neox", "gemma2", "granite",
                                    "cohere"])
def test_the_schedule_gives_transformers_logits(family, tmp_path):
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda")
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 12).tolist()
    interpreter = Interpreter(tmp_path / "case")
    first, then = interpreter.run(tokens[:8], 0), interpreter.run(tokens[8:], 8)
    families.assert_close(np.concatenate([first, then]), families.reference_logits(model, tokens))


def test_16_bit_weights_and_exact_tables(tiny_hf, tiny_model, tmp_path):
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda", dtype="float16")
    weights = load_file(tmp_path / "case" / "chip0" / "weights.safetensors")
    table = tiny_model.model.embed_tokens.weight.detach().to(torch.float16).numpy()
    rows = next(array for array in weights.values() if array.shape[1:] == table.shape[1:]
                and np.array_equal(array[:len(table)], table))
    assert rows.dtype == np.float16
    assert {array.dtype for name, array in weights.items() if name.startswith("rotary")} \
        == {np.dtype(np.float32)}


def test_a_value_s_place_is_used_again(tiny_hf, tmp_path):
    """The arena is a fraction of what all values together take."""
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda")
    schedule = read_schedule(tmp_path / "case" / "chip0" / "schedule.json")
    together = sum(4 * t.shape[-1] for t in schedule.tensors if t.kind == "value")
    assert schedule.token_bytes < together / 4


def test_several_chips_are_refused(tiny_hf, tmp_path):
    with pytest.raises(llmc.LlmcError, match="one chip"):
        llmc.compile(tiny_hf, tmp_path / "case", target="cuda", tp_size=2)
    assert not (tmp_path / "case").exists()


def test_running_without_the_extension_says_how_to_get_it(tiny_hf, tmp_path, monkeypatch):
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda")
    monkeypatch.setattr("llmc.runtime.engines.cuda.find_spec", lambda name: None)
    with pytest.raises(llmc.LlmcError, match=r"has no CUDA engine; install it"):
        llmc.LLM(tmp_path / "case")


def test_a_broken_schedule_is_one_sentence(tiny_hf, tmp_path):
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda")
    path = tmp_path / "case" / "chip0" / "schedule.json"
    path.write_text(path.read_text().replace('"op": "Embedding"', '"op": 7'))
    with pytest.raises(llmc.LlmcError, match="is not a valid schedule: nodes.0.op"):
        read_schedule(path)


def test_memory_is_counted_in_the_model_s_dtype_and_diff_refuses(tiny_hf, tmp_path):
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda", dtype="bfloat16")
    manifest = read_manifest(tmp_path / "case")
    dims = manifest.dims
    assert summarize(manifest)["chips"][0]["kv_cache_bytes"] == \
        2 * 2 * dims.num_layers * dims.num_kv_heads * dims.head_dim * dims.max_seq_len
    with pytest.raises(llmc.LlmcError, match="diff runs what is compiled for target cpu"):
        diff(tmp_path / "case", tiny_hf)
