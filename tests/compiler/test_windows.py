"""Sliding windows, recognized from the masks of each layer."""

import copy

import families
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    masking_utils,
)

import llmc
from llmc.compiler.frontend import load, parts, trace
from llmc.compiler.frontend.masks import evaluate
from llmc.compiler.graph.rewrite import NoMatch, Settings
from llmc.compiler.lower import lower
from llmc.compiler.options import CompileOptions
from llmc.compiler.passes.mask import MaskProver, Reach
from llmc.compiler.windows import check_windows

WINDOW = {name: "window_size" if name == "gpt_neo" else "sliding_window"
          for name, config in {**families.FAMILIES, **families.UNPLANNED}.items()
          if {"sliding_window", "window_size"} & config.keys()}


@pytest.mark.parametrize("family", WINDOW)
def test_contexts_longer_than_the_window_show_whether_it_is_applied(family):
    """test_families.py compares each of these with transformers at this length."""
    tokens = np.random.default_rng(3).integers(3, families.VOCAB, 28).tolist()
    logits = [families.reference_logits(families.tiny_model(family, **{WINDOW[family]: size}),
                                        tokens) for size in (8, 9, 28)]
    assert len(logits[0]) == 28
    for other in logits[1:]:
        np.testing.assert_allclose(logits[0][:8], other[:8], atol=1e-4)
        assert np.abs(logits[0] - other).max() > 1e-3 * np.ptp(logits[0])


class ForgetfulConfig(MistralConfig):
    """Config of a model whose masks use `sliding_window` and whose attention uses `told`."""

    model_type = "forgetful"
    told: int | None = None


class Forgetful(MistralForCausalLM):
    config_class = ForgetfulConfig

    def __init__(self, config):
        super().__init__(config)
        told = copy.copy(self.config)
        told.sliding_window = config.told
        for layer in self.model.layers:
            layer.self_attn.config = told


@pytest.fixture(scope="module")
def forgetful():
    """Factory by the attention's window: a tiny model with a window of 8 in its masks."""
    AutoConfig.register("forgetful", ForgetfulConfig)
    AutoModelForCausalLM.register(ForgetfulConfig, Forgetful)
    return lambda told: families.tiny_model("forgetful", **families.FAMILIES["mistral"], told=told)


def test_a_window_in_the_mask_alone_is_used(forgetful, tmp_path):
    model = forgetful(None)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case")
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 24).tolist()
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(tokens), families.reference_logits(model, tokens))


def test_different_windows_of_mask_and_attention_are_refused(forgetful, tmp_path):
    directory = families.save(forgetful(5), tmp_path)
    with pytest.raises(llmc.LlmcError, match="passes sliding_window 5 to its attention, but its "
                                             "mask allows a window of 8.*; use another model"):
        load(directory)


def test_different_windows_of_config_and_model_are_refused(tmp_path):
    raw = load(families.save(families.tiny_model("gemma3_text"), tmp_path))
    graph = lower(raw, CompileOptions()).graphs[0]
    check_windows(graph, raw.config, raw.architecture, 64)
    for change, match in (
            ({"sliding_window": 16}, "layer 0 of 'Gemma3ForCausalLM' has sliding window 8, but "
                                     "its config expects sliding_window 16"),
            ({"layer_types": ["full_attention"] * 8}, "layer 0 .* config expects full attention"),
            ({"layer_types": ["sliding_attention"] * 8}, "layer 5 .* has full attention")):
        with pytest.raises(llmc.LlmcError, match=match):
            check_windows(graph, {**raw.config, **change}, raw.architecture, 64)
        check_windows(graph, {**raw.config, **change}, raw.architecture, 8)  # no difference
    stray = {**raw.config, "model_type": "llama"}  # the class lacks this key
    check_windows(graph, {**stray, "sliding_window": 16}, raw.architecture, 64)


def test_mask_functions_are_recognized_by_their_values():
    causal = masking_utils.causal_mask_function
    full = masking_utils.bidirectional_mask_function
    assert (evaluate(causal).causal, evaluate(causal).window) == (True, 0)
    assert not evaluate(full).causal
    for size in (2, 8, 4096, 70000, 200000):
        function = masking_utils.sliding_window_causal_mask_function(size)
        shown = evaluate(function, 300000)
        assert shown.window == size
        assert shown.has_window(size)
        assert not shown.has_window(size + 1)
        in_chunks = masking_utils.chunked_causal_mask_function(size, torch.zeros(1).long())
        shown = evaluate(in_chunks, 300000)
        assert (shown.causal, shown.window, shown.chunk) == (True, 0, size)
        assert not shown.has_window(size)
    beyond = evaluate(masking_utils.sliding_window_causal_mask_function(300000), 300000)
    assert beyond.window == 0
    assert beyond.has_window(300000)
    assert not beyond.has_window(1000)


def test_other_mask_functions_are_refused_by_name():
    no_padding = torch.zeros(1, dtype=torch.int64)
    causal = masking_utils.causal_mask_function
    late = masking_utils.chunked_causal_mask_function(128, no_padding + 5)
    image = torch.where(torch.arange(1 << 17) < 100, 0, -1)[None]
    blocks = masking_utils.or_masks(causal, masking_utils.blockwise_overlay(image))
    hole = masking_utils.and_masks(causal, lambda batch, head, q, k: (q - k) % 40000 != 39000)
    for function, match in ((late, "neither full nor causal"),
                            (blocks, "bidirectional attention within blocks"),
                            (hole, "neither full nor causal")):
        with pytest.raises(llmc.LlmcError, match=match):
            evaluate(function)


def test_a_non_causal_decoder_is_refused(monkeypatch):
    config = families.tiny_encoder_decoder("bart").config
    config._attn_implementation = parts.ATTENTION
    monkeypatch.setattr("transformers.models.bart.modeling_bart.create_causal_mask",
                        masking_utils.create_bidirectional_mask)
    with trace.alone(), pytest.raises(llmc.LlmcError, match="in the decoder sees all keys"):
        trace._run_exporter(config, parts.DECODER, False)


MASK = """<ir_version: 10, opset_import: ["" : 18]>
mask (int64[batch, seq] input_ids) => (float[1, 1, seq, seq] mask)
<int64 zero = {{0}}, int64 one = {{1}}, int64[1] axis = {{1}}, float low = {{-1e38}},
 float none = {{0}}, int64[4] rank = {{1, 1, -1, 1}}, int64[4] last = {{1, 1, 1, -1}}, {numbers}>
{{
  shape = Shape(input_ids)
  seq = Gather(shape, one)
  places = Range(zero, seq, one)
  query = Reshape(places, rank)
  key = Reshape(places, last)
  later = Greater(key, query)
  {body}
  mask = Where(hidden, low, none)
}}"""
WINDOWED = """first = Sub(query, window)
  before = LessOrEqual(key, first)
  hidden = Or(later, before)"""


def window_of(body, max_seq_len, numbers="int64 window = {0}"):
    graph = gs.import_onnx(onnx.parser.parse_model(MASK.format(body=body, numbers=numbers)))
    reach = MaskProver(set(), Settings(max_seq_len, 1)).reach([graph.outputs[0]], False)
    if isinstance(reach, Reach):
        return (reach.chunk, "chunk") if reach.chunk else reach.window
    return reach


@pytest.mark.parametrize("size", [8, 100, 3000, 100000])
def test_a_large_window_in_an_exported_mask_is_recognized(size):
    numbers = f"int64 window = {{{size}}}"
    for max_seq_len in (8, 101, 4096, 131072):
        assert window_of(WINDOWED, max_seq_len, numbers) == (size if size < max_seq_len else 0)
    computed = "window = Mul(thirty, hundred)\n  " + WINDOWED
    assert window_of(computed, 4096, "int64 thirty = {30}, int64 hundred = {100}") == 3000


def test_a_position_dependent_mask_is_kept():
    triangle = """full = Equal(query, query)
  square = Expand(full, both)
  number = Cast<to = 7>(square)
  upper = Trilu<upper = 1>(number, diagonal)
  lower = Trilu<upper = 0>(number, below)
  sum = Add(upper, lower)
  hidden = Cast<to = 9>(sum)""".replace("both)", "size)").replace(
        "full =", "size = Concat<axis = 0>(ones, shape1, shape1)\n  full =").replace(
        "size =", "shape1 = Unsqueeze(seq, start)\n  size =", 1)
    numbers = ("int64[2] ones = {1, 1}, int64[1] start = {0}, int64 diagonal = {1}, "
               "int64 below = {-300}")
    assert window_of(triangle, 64, numbers) == 0
    assert window_of(triangle, 2048, numbers) == 300
    refused = window_of(triangle, 131072, numbers)
    assert isinstance(refused, NoMatch)
    assert "compile with --max_seq_len of at most 4096" in refused.reason


@pytest.mark.parametrize("size", [8, 3000, 100000])
def test_large_chunks_in_an_exported_mask_are_recognized(size):
    quotients = """mine = Div(query, size)
  its = Div(key, size)"""
    remainders = """ahead = Mod(query, size)
  mine = Sub(query, ahead)
  since = Mod(key, size)
  its = Sub(key, since)"""
    for body in (quotients, remainders):
        chunks = body + """
  same = Equal(mine, its)
  apart = Not(same)
  hidden = Or(later, apart)"""
        for max_seq_len in (8, 101, 4096, 131072):
            assert window_of(chunks, max_seq_len, f"int64 size = {{{size}}}") == (
                (size, "chunk") if size < max_seq_len else 0)


def test_other_exported_masks_are_refused():
    gaps = """gone = Mod(key, window)
  some = Equal(gone, zero)
  hidden = Or(later, some)"""
    refused = window_of(gaps, 131072, "int64 window = {3000}")
    assert isinstance(refused, NoMatch)
    assert "not causal" in refused.reason
