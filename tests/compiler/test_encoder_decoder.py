"""Encoder-decoder models: logits of every step equal transformers', and the graphs' contents."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import families
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
import torch
from safetensors.numpy import load_file
from schedule_interpreter import Interpreter

import llmc
from llmc.artifacts.manifest import Target
from llmc.artifacts.program import read_program
from llmc.compiler.lower import lower
from llmc.compiler.options import CompileOptions
from llmc.compiler.passes.attention import bias
from llmc.runtime.collectives import Communicator

PREFILL, STEPS = 5, 12


def reference_logits(model, source, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([tokens]),
                     use_cache=False).logits[0].numpy()


def check(model, raw, cases):
    rng = np.random.default_rng(3)
    sources = [rng.integers(3, 100, length).tolist() for length in (60, 7, 23)]
    rows = [rng.integers(3, 100, PREFILL + STEPS).tolist() for _ in sources]
    cuts = [PREFILL, 1, PREFILL - 2]
    expected = [reference_logits(model, *both) for both in zip(sources, rows, strict=True)]
    for case in cases.values():
        with llmc.LLM(case) as llm:
            families.assert_close(llm.logits(rows[0], sources[0]), expected[0])
            session = llm.session(3, sources)
            got = session.extend([row[:cut] for row, cut in zip(rows, cuts, strict=True)])
            for step in range(STEPS):
                wanted = [truth[cut + step - 1] for truth, cut in zip(expected, cuts, strict=True)]
                families.assert_close(got, np.stack(wanted))
                got = session.extend([[row[cut + step]]
                                      for row, cut in zip(rows, cuts, strict=True)])


@pytest.mark.parametrize("name", families.ENCODER_DECODERS)
def test_logits_of_every_step_equal_transformers_at_one_and_two_chips(name, encoder_decoder):
    check(*encoder_decoder(name))


@pytest.mark.parametrize("name", families.once(families.UNPLANNED_ENCODER_DECODERS))
def test_an_encoder_decoder_without_a_family_rule_compiles(name, encoder_decoder):
    check(*encoder_decoder(name))


def test_the_encoder_computes_the_cross_attention_kv(encoder_decoder):
    _, _, cases = encoder_decoder("bart")
    for chip in ("chip0", "chip1"):
        encoder, decoder = (onnx.load(cases["tp2"] / chip / f"{name}.onnx",
                                      load_external_data=False).graph
                            for name in ("encoder", "graph"))
        memory = {f"memory_{kind}_{layer}" for kind in ("key", "value") for layer in range(3)}
        assert {tensor.name for tensor in encoder.output} == memory
        given = {tensor.name for tensor in decoder.input}
        assert memory | {"memory_starts", "encoder_sequence_length"} <= given
        cross = [node for node in decoder.node if node.op_type == "BidirectionalAttention"]
        assert len(cross) == 3 and all(set(node.input[1:3]) <= memory for node in cross)
        projections = {"model.decoder.layers.0.encoder_attn.k_proj.weight",
                       "model.decoder.layers.2.encoder_attn.v_proj.weight"}
        assert projections <= {tensor.name for tensor in encoder.initializer}
        assert not projections & {tensor.name for tensor in decoder.initializer}
        width = next(t for t in encoder.output).type.tensor_type.shape.dim[1].dim_value
        assert width == 32  # half of the heads


def compile_for_gpus(raw, case, dtype="float32", tp_size=1):
    return families.write_encoder_decoder(raw, case, Target(kind="cuda"),
                                          CompileOptions(dtype=dtype), tp_size)


@pytest.mark.parametrize("name", families.once([*families.ENCODER_DECODERS,
                                                *families.UNPLANNED_ENCODER_DECODERS]))
def test_the_schedules_for_gpus_give_transformers_logits(name, encoder_decoder, tmp_path):
    model, raw, _ = encoder_decoder(name)
    compile_for_gpus(raw, tmp_path / "case")
    interpreter = Interpreter(tmp_path / "case")
    rng = np.random.default_rng(5)
    sources = [rng.integers(3, 100, length).tolist() for length in (17, 5)]
    tokens = rng.integers(3, 100, 7).tolist()
    places = [interpreter.encode(source, start)
              for source, start in zip(sources, (20, 3), strict=True)]
    for source, memory in zip(sources, places, strict=True):
        logits = [interpreter.run(tokens[:4], 0, memory), interpreter.run(tokens[4:], 4, memory)]
        families.assert_close(np.concatenate(logits), reference_logits(model, source, tokens))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gpu_programs_are_typed_onnx(dtype, encoder_decoder, tmp_path):
    _, raw, _ = encoder_decoder("t5")
    manifest = compile_for_gpus(raw, tmp_path / "case", dtype)
    for file in ("graph.onnx", "encoder.onnx"):
        path = tmp_path / "case" / "chip0" / file
        assert f"chip0/{file}" in {entry.path for entry in manifest.files}
        onnx.checker.check_model(path)
        onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False),
                                          check_type=True, strict_mode=True)
    kinds = {tensor.dtype for tensor in manifest.chips[0].encoder.outputs}
    assert kinds == {dtype}


def test_two_ranks_schedules_give_transformers_logits(encoder_decoder, tmp_path):
    model, raw, _ = encoder_decoder("t5")
    compile_for_gpus(raw, tmp_path / "case", tp_size=2)
    communicator = Communicator(2)
    source, tokens = list(range(5, 19)), [0, 7, 9]

    def run(rank):
        interpreter = Interpreter(tmp_path / "case", rank, communicator)
        return interpreter.run(tokens, 0, interpreter.encode(source, 0))
    with ThreadPoolExecutor(2) as threads:
        for logits in threads.map(run, range(2)):
            families.assert_close(logits, reference_logits(model, source, tokens))


def test_encoder_output_frees_its_arena_memory_after_the_copy(encoder_decoder, tmp_path):
    _, raw, _ = encoder_decoder("t5")
    manifest = compile_for_gpus(raw, tmp_path / "case", "float16")
    chip, = manifest.chips
    schedules = [read_program(tmp_path / "case" / step.path)
                 for step in (*chip.steps, *chip.encoder.steps)]
    decoder, encoder = schedules
    memory = {t.name for t in decoder.tensors if t.kind == "memory"}
    assert memory == {t.name for t in encoder.tensors if t.kind == "memory"} and len(memory) == 8
    offsets = {t.offset for t in encoder.tensors if t.kind == "value" and t.name in memory}
    assert len(offsets) < 8
    for before, node in zip(encoder.nodes, encoder.nodes[1:], strict=False):
        if node.op == "Scatter":
            assert node.inputs[0] == before.outputs[0]
    stored = load_file(tmp_path / "case" / "chip0" / "weights.safetensors")
    used = {t.name for s in schedules for t in s.tensors if t.kind == "weight"}
    unused = stored.keys() - used  # indices of columns that are views, which graph.onnx has
    assert used <= stored.keys() and all(stored[name].dtype == np.int32 for name in unused)
    table = next(n for n in encoder.nodes if n.op == "Embedding").inputs[1]
    assert encoder.tensors[table].name in {t.name for t in decoder.tensors}


def test_weights_shared_by_encoder_and_decoder_are_stored_once(encoder_decoder):
    model, _, cases = encoder_decoder("t5")
    manifest = llmc.LLM(cases["tp1"]).manifest
    tied = model.shared.weight.numel() * 4
    parameters = sum(p.numel() for p in model.parameters()) * 4
    assert manifest.chips[0].weight_bytes < parameters + tied // 2


def test_t5_s_biases_are_read_for_every_distance(encoder_decoder):
    model, raw, _ = encoder_decoder("t5-gated")
    lowered = lower(families.copy_raw(raw), CompileOptions(max_seq_len=600, mem_max_seq_len=600))
    for graph, stack, side in ((lowered.encoders[0], model.encoder, 1),
                               (lowered.graphs[0], model.decoder, 0)):
        node = next(n for n in graph.nodes if "distance_bias" in n.inputs[-1].name)
        table = node.inputs[-1]._values.load()
        with torch.no_grad():
            truth = stack.block[0].layer[0].SelfAttention.compute_bias(600, 600)[0].numpy()
        reach = (table.shape[1] - 1) // (1 + side)
        for query in (0, 17, 300, 599):
            keys = np.arange(600 if side else query + 1)
            columns = np.clip(keys - query, -reach, reach) + reach if side else \
                np.minimum(query - keys, reach)
            np.testing.assert_array_equal(table[:, columns], truth[:, query, keys])


def test_a_distance_bias_without_a_limit_is_refused(encoder_decoder, monkeypatch):
    _, raw, _ = encoder_decoder("t5-gated")
    monkeypatch.setattr(bias, "_LENGTH", 32)
    with pytest.raises(llmc.LlmcError, match="the bias of the scores still changes at distance 2.; "
                                             "compile with --mem_max_seq_len of at most 32"):
        lower(families.copy_raw(raw), CompileOptions(max_seq_len=32, mem_max_seq_len=64))
    lower(families.copy_raw(raw), CompileOptions(max_seq_len=32, mem_max_seq_len=32))


def test_tensorrt_rtx_refuses_encoder_decoders(encoder_decoder, tmp_path, monkeypatch):
    _, _, cases = encoder_decoder("t5")
    monkeypatch.setattr("llmc.compiler.targets.tensorrt_rtx.describe", lambda options: None)
    with pytest.raises(llmc.LlmcError, match="'T5ForConditionalGeneration' is an encoder-decoder "
                                             "model, which target 'tensorrt_rtx' does not "
                                             "support; compile it with --target cpu, cuda "
                                             "or tensorrt"):
        llmc.compile(cases["tp1"].parent / "hf", tmp_path / "case", target="tensorrt_rtx")


@pytest.mark.parametrize(("name", "options", "match"), [
    ("bart", {"mem_max_seq_len": 65}, "mem_max_seq_len 65 is not supported: .* allowed: 2 to 64"),
    ("bart", {"max_seq_len": 65}, "max_seq_len 65 is not supported: .* allowed: 2 to 64"),
    ("t5", {"tp_size": 5}, "tp_size 5 exceeds num_attention_heads 4"),
])
def test_a_limit_of_the_model_is_named(name, options, match, encoder_decoder):
    _, raw, _ = encoder_decoder(name)
    with pytest.raises(llmc.LlmcError, match=match):
        lower(families.copy_raw(raw), CompileOptions(**options))


def test_an_encoder_limit_is_refused_for_a_causal_lm(tiny_hf, tmp_path):
    with pytest.raises(llmc.LlmcError, match="'LlamaForCausalLM' has no encoder; leave it out"):
        llmc.compile(tiny_hf, tmp_path / "case", mem_max_seq_len=8)


def test_a_missing_decoder_start_token_is_refused(encoder_decoder):
    _, raw, _ = encoder_decoder("t5")
    silent = replace(families.copy_raw(raw), config={"architectures": ["X"]}, generation={})
    with pytest.raises(llmc.LlmcError, match="'X' has no decoder_start_token_id; add it to "
                                             "generation_c"):
        lower(silent, CompileOptions())


def test_unknown_readers_of_the_encoder_output_are_refused(encoder_decoder):
    _, raw, _ = encoder_decoder("bart")
    copied = families.copy_raw(raw)
    graph = copied.graph
    source = next(tensor for tensor in graph.inputs if tensor.name == "encoder_output")
    norm = next(node for node in graph.nodes if node.op == "LayerNormalization")
    total = gs.Variable("total", np.float32, norm.outputs[0].shape)
    for reader in list(norm.outputs[0].outputs):
        reader.inputs = [total if tensor is norm.outputs[0] else tensor
                         for tensor in reader.inputs]
    graph.nodes.append(gs.Node("Add", "total", inputs=[norm.outputs[0], source], outputs=[total]))
    with pytest.raises(llmc.LlmcError, match="Add 'total' reads 'encoder_output', which depends on "
                                             "the encoder output; supported only as attention's"):
        lower(copied, CompileOptions())
