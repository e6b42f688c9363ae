"""Errors for unsupported models, raised before the export if possible.
"""

import json
import os

import families
import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import llmc
from llmc.compiler import preflight
from llmc.compiler.frontend import trace
from llmc.compiler.frontend.features import check_features
from llmc.compiler.frontend.parts import CAUSAL_LM
from llmc.compiler.options import CompileOptions

_LLAMA = families.FAMILIES["llama"]
_EXPERTS = r"an unsupported implementation of MoE \({} 4; \w+ '[\w.]+'\)"
FEATURES = {
    "jetmoe": (dict(_LLAMA, num_local_experts=4, num_experts_per_tok=2),
               _EXPERTS.format("num_local_experts")),
    "mamba": (dict(hidden_size=64, num_hidden_layers=2),
              r"has state-space layers \(Mamba\) \(MambaMixer "),
    "jamba": (dict(_LLAMA, num_experts=4, mamba_dt_rank=4),
              r"has state-space layers \(Mamba\)"),
    "rwkv": (dict(hidden_size=64, num_hidden_layers=2), r"has RWKV layers"),
    "xlstm": (dict(hidden_size=64, num_hidden_layers=2, num_heads=4), r"has xLSTM layers"),
    "minimax": (dict(_LLAMA, num_hidden_layers=2), r"has linear attention with a recurrent state "),
    "recurrent_gemma": (dict(_LLAMA), r"has gated linear recurrences"),
    "diffllama": (_LLAMA, r"has differential attention"),
    "gemma3n_text": (dict(_LLAMA, num_hidden_layers=4, num_kv_shared_layers=0), r"has AltUp"),
    "longcat_flash": (dict(vocab_size=families.VOCAB, hidden_size=64, num_layers=1,
                           ffn_hidden_size=96, expert_ffn_hidden_size=40, n_routed_experts=4,
                           moe_topk=2, num_attention_heads=4, head_dim=8),
                      r"has identity experts \(zero experts\) "),
    "reformer": (dict(hidden_size=64, num_attention_heads=4, is_decoder=True,
                      axial_pos_embds=False, max_position_embeddings=64),
                 r"has LSH attention .* and local attention in chunks"),
    "prophetnet": (dict(hidden_size=64, num_encoder_layers=1, num_decoder_layers=1,
                        num_encoder_attention_heads=4, num_decoder_attention_heads=4),
                   r"has n-gram attention"),
    "cpmant": (dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, dim_head=16),
               r"has attention biases by segment"),
    "xlm": (dict(emb_dim=64, n_layers=2, n_heads=4, causal=True),
            r"has padding masks computed from token ids .* \(XLMModel 'transformer'\)"),
    "bert": (dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
             r"has bidirectional attention \(BertSelfAttention "),
}


@pytest.fixture
def no_export(monkeypatch):
    """Fail if an export starts."""
    def begun(*args):
        raise AssertionError("an export was begun")

    monkeypatch.setattr(trace, "_run_exporter", begun)
    monkeypatch.setattr("llmc.compiler.frontend.export.trace", begun)


@pytest.mark.parametrize("family", FEATURES)
def test_features_are_named_before_the_export(family, tmp_path, no_export):
    config, match = FEATURES[family]
    AutoConfig.for_model(family, **{"vocab_size": families.VOCAB, **config}).save_pretrained(
        tmp_path)
    save_file({"lm_head.weight": np.zeros((families.VOCAB, 64), np.float32)},
              tmp_path / "model.safetensors")
    with pytest.raises(llmc.LlmcError, match=match) as caught:
        llmc.compile(tmp_path, tmp_path / "case")
    assert "\n" not in str(caught.value)


def test_packages_that_transformers_lacks_are_named(tiny_hf, tmp_path, no_export, monkeypatch):
    def from_config(*_, **__):
        raise ImportError("\nTimmWrapperModel requires the timm library but it was not found in "
                          "your environment. You can install it with pip:\n`pip install timm`.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", from_config)
    with pytest.raises(llmc.LlmcError, match="as a causal LM: TimmWrapperModel requires the timm "
                                             "library but it was not found in your environment; "
                                             "install it, or use another model"):
        llmc.compile(tiny_hf, tmp_path / "case")


@pytest.mark.parametrize(("options", "match"), [
    (dict(target="abacus"), "unknown target 'abacus'; use one of: cpu"),
    (dict(dtype="float8"), "has no dtype 'float8'; supported: float32"),
    (dict(dtype="bf16", target="cuda"), "has no dtype 'bf16'; did you mean 'bfloat16'\\? Supp"),
    (dict(dtype="fp32"), "has no dtype 'fp32'; did you mean 'float32'\\? Supported: float32"),
    (dict(dtype="bf16"), "target 'cpu' has no dtype 'bf16'; supported: float32"),
    (dict(dtype="half"), "target 'cpu' has no dtype 'float16'"),
    (dict(kv_dtype="int4"), "has no kv_dtype 'int4'; leave it out"),
    (dict(compute_capability="9.0"), "target 'cpu' has no compute_capability"),
    (dict(tp_size=0), "tp_size 0 is below 1"),
    (dict(tp_size=9), "tp_size 9 exceeds num_attention_heads 4 of 'LlamaForCausalLM'; allowed: 1 "),
    (dict(tp_size=2, target="tensorrt_rtx"), "has no collectives; compile with --tp_size 1"),
    (dict(max_seq_len=1), "max_seq_len 1 is below 2"),
    (dict(max_seq_len=100000), "max_position_embeddings 64; allowed: 2 to 64"),
    (dict(mem_max_seq_len=64), "mem_max_seq_len 64 is given, but .* has no encoder"),
    (dict(max_batch_size=0), "max_batch_size 0 is below 1"),
    (dict(max_batch_size=3), "target 'cpu' has no compiled maximum; leave it out"),
    (dict(max_batch_size=65537), "max_batch_size 65537 is above 65536"),
    (dict(mem_max_seq_len=2**30), "mem_max_seq_len 1073741824 is above 134217728"),
    (dict(tp_size="2"), "tp_size is '2', expected a whole number"),
    (dict(max_seq_len=8.0), "max_seq_len is 8.0, expected a whole number or None"),
    (dict(allow_nan=1), "allow_nan is 1, expected True or False"),
    (dict(target=["cpu"]), "target is \\['cpu'\\], expected a text"),
    (dict(quantize=8), "quantize is 8, expected a text"),
    (dict(calibrate=True), "calibrate is True, expected a path or None"),
])
def test_impossible_options_are_refused_before_the_export(tiny_hf, tmp_path, options, match,
                                                          no_export):
    with pytest.raises(llmc.LlmcError, match=match):
        llmc.compile(tiny_hf, tmp_path / "case", **options)


@pytest.mark.parametrize(("dtype", "target", "config", "expected"), [
    ("half", "cuda", {}, "float16"), ("float", "cuda", {}, "float32"),
    (torch.bfloat16, "cuda", {}, "bfloat16"), (torch.float32, "cpu", {}, "float32"),
    ("auto", "cuda", {"dtype": "float16"}, "float16"),
    ("auto", "cuda", {"text_config": {"torch_dtype": "float16"}}, "float16"),
    ("auto", "cuda", {"dtype": "float8_e4m3fn"}, "bfloat16"), ("auto", "cuda", {}, "bfloat16"),
    ("auto", "cpu", {"dtype": "bfloat16"}, "float32")])
def test_dtypes_are_read_as_torch_and_transformers_name_them(tmp_path, dtype, target, config,
                                                             expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert preflight.read_dtype(dtype, target, tmp_path) == expected


def about(has_encoder=False, generation=None, **config):
    known = dict(architectures=["Tiny"], hidden_size=64, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64)
    return preflight.About({**known, **config}, generation or {}, has_encoder)


@pytest.mark.parametrize(("options", "model", "match"), [
    (CompileOptions(target="cuda"), about(head_dim=12),
     "head_dim 12 of 'Tiny' is not a multiple of 8"),
    (CompileOptions(target="cuda"), about(hidden_size=4096), "head_dim 1024 of 'Tiny'"),
    (CompileOptions(target="tensorrt_rtx"), about(True, {"bos_token_id": 1}),
     "an encoder-decoder model"),
    (CompileOptions(), about(True), "has no decoder_start_token_id; add it to generation_config"),
    (CompileOptions(tp_size=3), about(True, {"bos_token_id": 1}, encoder_attention_heads=2),
     "tp_size 3 exceeds num_attention_heads 2"),
    (CompileOptions(mem_max_seq_len=65), about(True, {"bos_token_id": 1}), "mem_max_seq_len 65"),
    (CompileOptions(tp_size=5), about(text_config=dict(n_head=4)), "tp_size 5 exceeds"),
    (CompileOptions(language_model_only=True), about(), "'Tiny' has no encoders of images or"),
])
def test_unsupported_config_settings_are_refused(options, model, match):
    with pytest.raises(llmc.LlmcError, match=match):
        preflight.check_model(options, model)


@pytest.mark.parametrize("options", [
    CompileOptions(target="cuda", dtype="bfloat16", max_seq_len=9), CompileOptions(tp_size=4),
    CompileOptions(target="tensorrt", max_seq_len=64), CompileOptions(max_seq_len=64)])
def test_supported_config_settings_are_accepted(options):
    preflight.check_model(options, about())


def test_unusable_files_are_refused_before_the_export(tiny_hf, tmp_path, no_export):
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "case"):
        with pytest.raises(llmc.LlmcError, match="file"):
            llmc.compile(tiny_hf, output)
    hf = tmp_path / "hf"
    hf.mkdir()
    for name in ("config.json", "model.safetensors"):
        os.link(tiny_hf / name, hf / name)
    (hf / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    (hf / "vocab.json").write_text("{")
    with pytest.raises(llmc.LlmcError, match="tokenizer of .* cannot be converted"):
        llmc.compile(hf, tmp_path / "case")
    (hf / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    (hf / "vocab.json").unlink()
    (hf / "tokenizer_config.json").unlink()
    with pytest.raises(llmc.LlmcError, match=r"model-00001-of-00002.safetensors"):
        llmc.compile(hf, tmp_path / "case")


@pytest.mark.parametrize("text", [
    "y = NoSuchOp(x)", "y = MatMul(x, x, x)",
    "three = Add(one, two)\n  y = Add(x, three)",  # inconsistent shapes
])
def test_onnx_errors_become_llmc_errors(tiny_hf, tmp_path, text):
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
g (int64[batch, seq] input_ids) => (float[batch, seq, 8] logits)
<float[3] one = {{1, 2, 3}}, float[2] two = {{1, 2}}> {{
  x = Cast<to = 1>(input_ids)
  {text}
  logits = Identity(y)
}}""")
    onnx.save(model, tmp_path / "x.onnx")
    with pytest.raises(llmc.LlmcError) as caught:
        llmc.compile(tmp_path / "x.onnx", tmp_path / "case", hf_dir=tiny_hf)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "case").exists()


def test_sparse_attention_is_refused_beyond_its_top_k(no_export, tmp_path):
    family = families.LATENT["deepseek_v32"] | {"index_topk": 32}
    hf = families.save(families.tiny_model("deepseek_v32", **family), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match="^max_seq_len 33 is not supported: beyond index_topk "
                                             "32 the attention .* is sparse; allowed: 2 to 32$"):
        llmc.compile(hf, tmp_path / "case", max_seq_len=33)


def test_an_unsupported_head_dim_of_some_layers_is_refused(tmp_path):
    hf = families.save(families.tiny_model("gemma4_text", **{
        **families.GEMMA4_SHALLOW, "global_head_dim": 520}), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match="no kernel for llmc::CausalAttention with head_dim "
                                             "520 "):
        llmc.compile(hf, tmp_path / "case", target="cuda")


def test_layer_norm_of_heads_is_named(tmp_path):
    model = families.tiny_model("persimmon", **families.FAMILIES["llama"] | {
        "num_key_value_heads": 4})
    with pytest.raises(llmc.LlmcError, match=r"heads are normalized by LayerNorm") \
            as caught:
        llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case")
    assert "\n" not in str(caught.value)


def test_vision_settings_do_not_affect_the_language_model():
    vision = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=1)
    config = AutoConfig.for_model("git", **families.FAMILIES["llama"], vision_config=vision)
    with torch.device("meta"):
        check_features(AutoModelForCausalLM.from_config(config), CAUSAL_LM)


def test_tensors_with_unknown_producers_are_named(tmp_path, no_export, monkeypatch):
    hf = families.save(families.tiny_model("hrm_text"), tmp_path / "hf")
    monkeypatch.setattr("llmc.compiler.frontend.bind._splits", lambda converter: False)
    with pytest.raises(llmc.LlmcError, match=r"has a tensor '[\w.]+', which transformers converts "
                                             r"to '[\w.]+' by Chunk; llmc does not support that"):
        llmc.compile(hf, tmp_path / "case")


@pytest.mark.parametrize(("said", "words"), [
    ("Constraints violated (seq)! For more", "supports only some input lengths ("),
    ("Could not guard on data-dependent expression Eq", "branches on computed values ("),
    ("expected predicate to be bool", "expected predicate to be bool")])
def test_exporter_errors_about_model_code_are_explained(said, words):
    assert words in trace.root_cause(RuntimeError(said))
