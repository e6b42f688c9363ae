"""GGUF files: rows equal transformers' tensors, and unsupported files are refused."""

from dataclasses import dataclass, replace
from functools import partial

import families
import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from schedule_interpreter import Interpreter
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import llmc
from llmc.artifacts.manifest import Target, hash_file, read_manifest
from llmc.compiler import api
from llmc.compiler.check.diff import diff
from llmc.compiler.frontend import checkpoint, gguf_file
from llmc.compiler.frontend.gguf_header import read_header
from llmc.compiler.lower import lower
from llmc.compiler.options import CompileOptions
from llmc.compiler.quant.readers.gguf import form_of
from llmc.compiler.targets import cpu

VOCAB, WIDTH, TOKENS = 96, 64, 5000  # TOKENS make the vocabulary arrays long
LLAMA = {"context_length": 16384, "block_count": 2, "feed_forward_length": 96,
         "embedding_length": WIDTH, "attention.head_count": 4, "attention.head_count_kv": 2,
         "rope.dimension_count": 16, "attention.layer_norm_rms_epsilon": 1e-5}
GPT2 = {"context_length": 64, "block_count": 2, "embedding_length": WIDTH,
        "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5}
# Names of a layer's tensors with their shapes, rows first.
LAYER = {"attn_q.weight": (64, 64), "attn_k.weight": (32, 64), "attn_v.weight": (32, 64),
         "attn_output.weight": (64, 64), "attn_norm.weight": (64,), "ffn_norm.weight": (64,),
         "ffn_gate.weight": (96, 64), "ffn_up.weight": (96, 64), "ffn_down.weight": (64, 96)}
GPT2_LAYER = {"attn_qkv.weight": (192, 64), "attn_qkv.bias": (192,), "attn_norm.weight": (64,),
              "attn_output.weight": (64, 64), "ffn_norm.bias": (64,), "ffn_up.weight": (256, 64),
              "ffn_down.weight": (64, 256)}


@dataclass
class File:
    """Contents of a test file besides its layers."""

    architecture: str = "llama"
    fields: dict = None
    layer: dict = None
    more: dict = None
    kind: str = "Q8_0"
    kinds: dict = None  # types of some tensors, by a part of their names
    vocab_size: bool = True
    blocks: bool = False  # random blocks of types that gguf cannot quantize


# As above, in rows of whole blocks of 256 values.
WIDE = {**LLAMA, "embedding_length": 256, "feed_forward_length": 256, "rope.dimension_count": 64}
WIDE_LAYER = {name: (256,) if len(shape) == 1 else (128 if shape[0] == 32 else 256, 256)
              for name, shape in LAYER.items()}
SCALES = {"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208]}  # offsets of 16-bit scales in blocks


def random_blocks(kind, shape, rng):
    """Return random bytes, uint8 [rows, nbytes], without NaN scales."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (shape[0], shape[1] // numbers, nbytes), dtype=np.uint8)
    for at in SCALES.get(kind, [0] if kind[-1] == "0" or kind[0] == "I" else [0, 2]):
        data[..., at:at + 2] = rng.uniform(-2, 2, (*data.shape[:2], 1)).astype(np.float16) \
            .view(np.uint8)
    return data.reshape(shape[0], -1)


def write(path, file):
    """Write a GGUF file of random weights."""
    writer = gguf.GGUFWriter(path, file.architecture)
    fields = {**(LLAMA if file.fields is None else file.fields)}
    if file.vocab_size:
        fields["vocab_size"] = VOCAB
    for key, value in fields.items():
        name = f"{file.architecture}.{key}" if key != "tokenizer" else "tokenizer.ggml.model"
        {int: writer.add_uint32, float: writer.add_float32,
         str: writer.add_string}[type(value)](name, value)
    writer.add_token_list([f"t{i}" for i in range(TOKENS)])
    writer.add_token_scores([0.5] * TOKENS)
    rng = np.random.default_rng(0)
    width = fields["embedding_length"]
    shapes = {"token_embd.weight": (VOCAB, width), "output_norm.weight": (width,),
              **{f"blk.{i}.{name}": shape for i in range(2)
                 for name, shape in (LAYER if file.layer is None else file.layer).items()}}
    for name, shape in shapes.items():
        array = rng.standard_normal(shape).astype(np.float32)
        own = next((kind for part, kind in (file.kinds or {}).items() if part in name), file.kind)
        kind = gguf.GGMLQuantizationType[own if len(shape) > 1 else "F32"]
        data = random_blocks(own, shape, rng) if file.blocks and len(shape) > 1 \
            and not own.startswith("F") else gguf.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    for name, array in (file.more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path):
    """Return the result of load_gguf without the export."""
    header = read_header(path)
    config = gguf_file._read_config(path, header)
    gguf_file._scale_rope(path, header, config)
    return config, gguf_file._tensors(path, header, config)


@pytest.mark.parametrize("file", [
    File(), File(kind="F16"), *(File(kind=f"Q{kind}") for kind in ("4_0", "4_1", "5_0", "5_1")),
    File(kind="BF16"), File(kind="F32"),
    File("gemma2", layer={**LAYER, "post_attention_norm.weight": (64,),
                          "post_ffw_norm.weight": (64,)}),
    File("gpt2", GPT2, GPT2_LAYER, {"position_embd.weight": np.ones((64, WIDTH), np.float32)}),
    File("qwen2"),
    File("nemotron", layer={name: LAYER[name] for name in LAYER if name != "ffn_gate.weight"}),
], ids=lambda file: f"{file.architecture}-{file.kind}")
def test_gguf_rows_are_bitwise_equal_to_transformers(file, tmp_path):
    path = write(tmp_path / "m.gguf", file)
    config, tensors = read(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    truth = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert tensors.keys() == truth.keys()
    for name, tensor in truth.items():
        assert tensors[name].shape == tuple(tensor.shape)
        for nbytes in (1 << 30, 3000):  # whole, and in blocks of some rows
            found = np.concatenate(list(tensors[name].cast(np.float32).blocks(nbytes)))
            assert found.tobytes() == tensor.numpy().tobytes(), name


@pytest.mark.parametrize(("kind", "dtype", "size"), [
    ("Q4_0", "int4", 32), ("Q4_1", "uint4", 32), ("Q5_0", "int8", 32), ("Q5_1", "uint8", 32),
    ("Q8_0", "int8", 32), ("Q4_K", "uint4", 32), ("Q5_K", "uint8", 32), ("Q6_K", "uint8", 16)])
def test_blocks_of_every_type_dequantize_as_gguf_py(kind, dtype, size):
    """Merged with another type too."""
    rng = np.random.default_rng(1)

    def made(kind):
        data = random_blocks(kind, (6, 512), rng)
        return form_of(kind, (6, 512), "w", lambda start, stop: data[start:stop]), \
            gguf.dequantize(data, gguf.GGMLQuantizationType[kind])

    form, truth = made(kind)
    assert (form.dtype, form.group_size) == (dtype, size)
    assert np.array_equal(form.weight("w").load(), truth)
    assert np.array_equal(form.weight("w").rows(2, 5), truth[2:5])
    for other in ("Q4_0", "Q4_K", "Q6_K", "Q8_0"):
        second, below = made(other)
        merged = form.above([second])
        assert np.array_equal(merged.weight("w").load(), np.concatenate([truth, below])), other


def check_logits(path, target, case):
    """Compile a file; assert transformers' logits for the dequantized values."""
    raw = replace(gguf_file.load_gguf(path), save_tokenizer=lambda target: None)
    case.mkdir()
    options = CompileOptions(target=target)
    api.write(raw, lower(raw, options), Target(kind=target), options, case)
    config, tensors = read(path)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict({name: torch.tensor(tensor.load()) for name, tensor in tensors.items()},
                          strict=False)
    model.tie_weights()
    tokens = list(range(3, 20))
    if target == "cuda":
        logits = Interpreter(case).run(tokens, 0)
    else:
        with llmc.LLM(case) as llm:
            logits = llm.logits(tokens)
    families.assert_close(logits, families.reference_logits(model, tokens))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_compiled_file_keeps_its_blocks(kind, target, tmp_path, monkeypatch):
    """The tied embedding is quantized too."""
    path = write(tmp_path / "m.gguf", File(kind=kind))
    monkeypatch.setattr(cpu, "BODIES", "")  # exact bodies of standard ONNX
    check_logits(path, target, tmp_path / "case")
    forms = read_manifest(tmp_path / "case").chips[0].quantization
    assert {(form.dtype, form.group_size) for form in forms.values()} \
        == {("uint4" if kind == "Q4_1" else "int8", 32)}


MIXED = {
    # As in Q4_K_M: V and down projections have more bits than the others.
    "Q4_K_M": File(fields=WIDE, layer=WIDE_LAYER, kind="Q4_K", blocks=True, kinds={
        "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}),
    "minima-and-none": File(kind="Q4_0", kinds={"attn_k": "Q4_1", "attn_v": "Q8_0",
                                                "ffn_up": "Q5_1"}),
    "5-bits": File(kind="Q5_0", kinds={"attn_k": "Q4_0", "attn_v": "Q5_1", "ffn_gate": "Q8_0"}),
    "numbers-among": File(kind="Q4_0", kinds={"attn_v": "F16", "ffn_up": "F32"})}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("mixed", MIXED)
def test_a_layer_may_mix_gguf_types(mixed, target, tmp_path, monkeypatch):
    """Also among queries, keys and values, which are merged into one weight."""
    path = write(tmp_path / "m.gguf", MIXED[mixed])
    monkeypatch.setattr(cpu, "BODIES", "")  # exact bodies of standard ONNX
    check_logits(path, target, tmp_path / "case")


UNSERVED = ["Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
            "IQ1_S"]


@pytest.mark.parametrize("kind", UNSERVED)
def test_gguf_types_without_a_kernel_are_dequantized_with_a_note(kind, tmp_path):
    path = write(tmp_path / "m.gguf", File(fields=WIDE, layer=WIDE_LAYER, kind=kind, blocks=True))
    _, tensors = read(path)
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, own in (("model.embed_tokens.weight", "token_embd.weight"),
                      ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight")):
        truth = gguf.dequantize(raw[own].data, gguf.GGMLQuantizationType[kind])
        assert tensors[name].stored is None and truth.any()
        for nbytes in (1 << 30, 3000):
            found = np.concatenate(list(tensors[name].blocks(nbytes)))
            assert found.tobytes() == truth.astype(np.float32).tobytes(), name
    note, = gguf_file._notes(read_header(path), tensors)
    assert note == (f"15 weights among those in {kind} have a format without kernels: they are "
                    f"dequantized to float32, with its memory use and speed")


def test_a_file_of_such_a_type_is_dequantized_with_a_note(tmp_path):
    path = write(tmp_path / "m.gguf", File(fields=WIDE, layer=WIDE_LAYER, kind="Q3_K",
                                           blocks=True))
    raw = replace(gguf_file.load_gguf(path), save_tokenizer=lambda target: None)
    assert [note for note in raw.notes if "15 weights among those in Q3_K have a format" in note]
    check_logits(path, "cpu", tmp_path / "case")
    assert read_manifest(tmp_path / "case").quantization is None


@pytest.mark.parametrize("kind", ["Q8_K", "Q1_0"])
def test_unknown_gguf_types_are_refused_by_name(kind, tmp_path):
    path = write(tmp_path / "m.gguf", File(fields=WIDE, layer=WIDE_LAYER, kind=kind, blocks=True))
    _, tensors = read(path)
    with pytest.raises(llmc.LlmcError, match=f"'token_embd.weight' in '.*' is quantized as {kind},"
                                             f" which gguf cannot dequantize; give another"):
        tensors["model.embed_tokens.weight"].load()


@pytest.fixture(scope="module")
def q4_1(tmp_path_factory):
    return write(tmp_path_factory.mktemp("q4_1") / "m.gguf", File(kind="Q4_1"))


def test_quantizing_a_quantized_file_is_refused_before_the_export(q4_1, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "_read_config", None)  # which imports transformers
    with pytest.raises(llmc.LlmcError, match=r"quantized by GGUF \(Q4_1\) already; leave out "
                                             r"--quantize .* --quantize none .* --requantize"):
        llmc.compile(q4_1, tmp_path / "case", quantize="int8")
    with pytest.raises(llmc.LlmcError, match="requantize is given without quantize"):
        llmc.compile(q4_1, tmp_path / "case", requantize=True)


def test_a_quantized_file_is_requantized_with_an_option(q4_1, tmp_path):
    said = []
    manifest = llmc.compile(q4_1, tmp_path / "again", quantize="int8", group_size=32,
                            requantize=True, progress=said.append)
    assert manifest.quantization == ("int8",) and manifest.tokenizer.path is None
    assert {form.group_size for form in manifest.chips[0].quantization.values()} == {32}
    assert "the model has no tokenizer: it takes and returns token ids" in said
    llmc.compile(q4_1, tmp_path / "plain", quantize="none")
    again, plain = (load_file(tmp_path / name / "chip0" / "weights.safetensors")
                    for name in ("again", "plain"))
    name = "model.layers.1.mlp.down_proj.weight"
    groups = plain[name].reshape(64, 3, 32)
    made = (again[name].reshape(groups.shape).astype(np.float32) - 128) \
        * again[f"{name}_scale"][..., None]
    assert 0 < np.abs(made - groups).max() <= np.abs(groups).max() / 127 * 0.51
    report = diff(tmp_path / "again", q4_1, tokens=2)
    assert report.verdict is None and not report.weights


def test_requantizing_weights_that_are_not_quantized_is_refused(tiny_hf, tmp_path):
    with pytest.raises(llmc.LlmcError, match="has no quantized weights; leave it out"):
        llmc.compile(tiny_hf, tmp_path / "case", quantize="int8", requantize=True)


def test_an_unknown_tokenizer_is_refused_before_the_export(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf", File(fields={**LLAMA, "tokenizer": "xyz"}))
    monkeypatch.setattr(gguf_file, "_tensors", None)  # of what is exported
    with pytest.raises(llmc.LlmcError, match=r"cannot convert the tokenizer of '.*m.gguf' "
                                             r"\('tokenizer.ggml.model' is 'xyz'; .*\); give the"):
        llmc.compile(path, tmp_path / "case")


def test_the_manifest_has_the_digest_of_the_file(q4_1, tmp_path):
    source = llmc.compile(q4_1, tmp_path / "case").source
    file, = source.files
    assert (file.name, file.size, file.sha256) == ("m.gguf", q4_1.stat().st_size, hash_file(q4_1))
    assert source.repo_id is None and source.commit is None


@pytest.mark.parametrize("file", [File(), File(vocab_size=False), File("gemma2"),
                                  File("gpt2", GPT2, GPT2_LAYER, vocab_size=False)],
                         ids=lambda file: f"{file.architecture}-{file.vocab_size}")
def test_the_gguf_config_equals_that_of_transformers(file, tmp_path):
    path = write(tmp_path / "m.gguf", file)
    config = gguf_file._read_config(path, read_header(path)).to_dict()
    whole = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict()
    assert config["vocab_size"] == (VOCAB if file.vocab_size else TOKENS)
    assert {**config, "_name_or_path": ""} == {**whole, "_name_or_path": ""}


def test_vocabulary_arrays_are_not_parsed_by_the_gguf_reader(tmp_path, monkeypatch):
    """It would create several objects per token."""
    sizes = []
    real = gguf.GGUFReader.__init__

    def spy(self, path, *others):
        real(self, path, *others)
        sizes.append(max(len(field.parts) for field in self.fields.values()))

    monkeypatch.setattr(gguf.GGUFReader, "__init__", spy)
    read(write(tmp_path / "m.gguf", File()))
    assert sizes and max(sizes) < 100


def test_only_requested_rows_are_read(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf", File())
    _, tensors = read(path)
    counts = []
    real = checkpoint.read_rows
    monkeypatch.setattr(gguf_file, "read_rows", lambda *arguments: counts.append(
        arguments[-1] - arguments[-2]) or real(*arguments))
    tensors["model.embed_tokens.weight"].rows(7, 11)
    tensors["model.layers.1.self_attn.q_proj.weight"].rows(17, 30)  # in one head of 16 rows, or two
    assert counts[0] == 4 and sum(counts[1:]) <= 32


def factors(**changes):
    """Return llama.cpp's factors of Llama 3.1's rope, the divisors of the frequencies."""
    config = AutoConfig.for_model(
        "llama", hidden_size=64, num_attention_heads=4, max_position_embeddings=131072,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, **changes})
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].double()
    return (10000.0 ** -(torch.arange(0, 16, 2) / 16).double() / scaled).float().numpy()


def test_llama_3_s_rope_is_read_from_its_factors(tmp_path):
    assert len(set(factors())) > 2  # unscaled, scaled and interpolated frequencies
    config, _ = read(write(tmp_path / "m.gguf", File(more={"rope_freqs.weight": factors()})))
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["factor"] == pytest.approx(8, rel=1e-4)
    config, _ = read(write(tmp_path / "1.gguf", File(
        more={"rope_freqs.weight": np.ones(8, np.float32)})))
    assert config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(("file", "match"), [
    (File(more={"rope_freqs.weight": factors(high_freq_factor=2.0)}),
     "scales its rotary embedding .by 'rope_freqs.weight'"),
    (File(fields={**LLAMA, "rope.scaling.type": "yarn"}), r"scales its rotary embedding \(yarn\)"),
    (File(more={"blk.0.attn_magic.weight": np.ones((4, 4), np.float32)}),
     r"has a tensor 'blk.0.attn_magic.weight' \[4, 4\] F32, which the model of 'Llama"),
])
def test_gguf_features_without_transformers_support_are_refused(file, match, tmp_path):
    with pytest.raises(llmc.LlmcError, match=match):
        read(write(tmp_path / "m.gguf", file))


@pytest.mark.parametrize(("file", "match"), [
    (File("deepseek2", layer={}), "architecture 'deepseek2', which transformers does not read"),
    (File(layer={**LAYER, "attn_k.weight": (30, 64)}),
     r"'blk.0.attn_k.weight' \[30, 64\] in '.*' does not match the number of heads"),
    (File(fields={**LLAMA, "attention.head_count": 0}), "cannot be read as GGUF|build a model"),
    (File("phi3"), "build a model from 'Phi3Config' of '.*' .Padding_idx must be"),
    (File(fields={**LLAMA, "context_length": "x"}), "field 'max_position_embeddings': .* expected"),
])
def test_contradictory_or_unknown_gguf_metadata_is_refused(file, match, tmp_path):
    with pytest.raises(llmc.LlmcError, match=match):
        read(write(tmp_path / "m.gguf", file))


@pytest.mark.parametrize(("key", "value"), [
    ("block_count", 2**31), ("context_length", 2**31), ("attention.head_count", 2**31)])
def test_an_implausible_size_is_refused_before_allocation(key, value, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "_read_config", None)
    path = write(tmp_path / "m.gguf", File(fields={**LLAMA, key: value}))
    with pytest.raises(llmc.LlmcError, match=f"m.gguf' has {key} {value}, expected at most"):
        gguf_file.load_gguf(path)


def test_a_weight_that_is_not_finite_is_named(tmp_path, monkeypatch):
    layer = {name: shape for name, shape in LAYER.items() if name != "ffn_norm.weight"}
    odd = np.ones(64, np.float32)
    odd[3:5] = np.nan, np.inf
    path = write(tmp_path / "m.gguf", File(layer=layer, more={
        "blk.0.ffn_norm.weight": odd, "blk.1.ffn_norm.weight": np.ones(64, np.float32)}))
    with pytest.raises(llmc.LlmcError, match="'blk.0.ffn_norm.weight' .* 1 NaN and 1 infinite"):
        llmc.compile(path, tmp_path / "case")


def test_one_file_of_several_is_refused(tmp_path):
    path = tmp_path / "m-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(llmc.LlmcError, match="is one of 2 files of a model; join them"):
        gguf_file.load_gguf(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf", File()).read_bytes()


@settings(max_examples=150, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_refused_or_read_within_the_file(whole, tmp_path, data):
    size = 2000  # the header without tokens
    at = data.draw(st.integers(0, size))
    change = data.draw(st.sampled_from([
        lambda: whole[:at], lambda: whole[:at] + b"\xff" * 8 + whole[at + 8:],
        lambda: whole[:at] + b"\0" * 4 + whole[at + 4:], partial(bytes.fromhex, "47475546")]))
    path = tmp_path / "m.gguf"
    path.write_bytes(change())
    try:
        header = read_header(path)
    except llmc.LlmcError as error:
        assert str(error).startswith(f"'{path}' cannot be read as GGUF (") and \
            "\n" not in str(error)
        return
    assert all(t.offset >= 0 and t.offset + t.nbytes <= len(change()) for t in header.tensors)
