"""`llmc diff`: equal models pass, and a planted error is found with its layer and chip."""

import functools
import json
import shutil
from contextlib import contextmanager
from dataclasses import replace

import families
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from schedule_interpreter import Interpreters
from transformers import AutoModelForCausalLM

import llmc
from llmc.artifacts.manifest import Target, hash_file, read_manifest, write_manifest
from llmc.cli import main
from llmc.compiler import api
from llmc.compiler.check import diff as diff_module
from llmc.compiler.check.diff import compare, diff, judge_tokens
from llmc.compiler.check.reference import Greedy
from llmc.compiler.check.report import print_report, write_html
from llmc.compiler.frontend import load
from llmc.compiler.lower import lower
from llmc.compiler.options import CompileOptions


@functools.cache
def export(hf):
    return load(hf)


def loads(hf=None, **changes):
    """Replacement of `load`: the existing export of the reference or of `hf`."""
    return lambda reference, **_: replace(families.copy_raw(export(hf or reference)), **changes)


@pytest.fixture
def one_export(monkeypatch):
    """Let `diff` use an existing export."""
    monkeypatch.setattr(diff_module, "load", loads())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Factory by family: its Hugging Face directory."""
    @functools.cache
    def make(family):
        return families.save(families.tiny_model(family), tmp_path_factory.mktemp(family) / "hf")
    return make


def compile_export(hf, case, kind="cpu", dtype="float32", tp_size=1, kv_dtype="",
                   plant=lambda graph: None):
    """Write a case directory from the existing export; `plant` changes the last rank's graph."""
    raw = families.copy_raw(export(hf))
    options = CompileOptions(dtype=dtype, kv_dtype=kv_dtype, target=kind, tp_size=tp_size)
    lowered = lower(raw, options)
    plant(lowered.graphs[-1])
    case.mkdir()
    api.write(raw, lowered, Target(kind=kind), options, case)
    return case


def field(op, name, change):
    """Return a change of an attribute of the op's second node."""
    def plant(graph):
        node = [node for node in graph.nodes if node.op == op][1]
        node.attrs[name] = change(node.attrs[name])
    return plant


def rehash(case):
    """Update the manifest to the present files, as if compiled so."""
    manifest = read_manifest(case)
    files = [entry.model_copy(update={"size": (case / entry.path).stat().st_size,
                                      "sha256": hash_file(case / entry.path)})
             for entry in manifest.files]
    write_manifest(manifest.model_copy(update={"files": tuple(files)}), case)


def equal(tokens):
    return all(token.token == token.reference_token for token in tokens)


def allowed(report):
    return {f"{d.allowed:.3g}" for d in report.layers}


@pytest.mark.parametrize("case", ["case_tp1", "case_tp2"])
def test_an_unmodified_model_is_within_tolerance(case, tiny_hf, one_export, request):
    report = diff(request.getfixturevalue(case), tiny_hf, bisect=True)
    assert report.verdict is None and report.first_op is None
    assert len(report.tokens) == 16 and equal(report.tokens)
    names = {d.name for d in report.layers}
    assert names == {*(f"hidden_states.{i}" for i in range(4)), "logits"}
    assert {d.pair for d in report.layers} == {
        "compiled vs export", "export vs transformers", "compiled vs transformers"}
    assert max(d.relative for d in report.layers) < 1e-5
    assert allowed(report) == {"1e-05"}
    assert min(d.cosine for d in report.layers) > 0.999999
    assert report.allowed == "1e-05 of a tensor's range"


def test_partial_sums_of_ranks_are_not_reported(one_export, tiny, tmp_path):
    """gpt_neox adds attention and MLP before the AllReduce."""
    case = compile_export(tiny("gpt_neox"), tmp_path / "case", tp_size=2)
    assert diff(case, tiny("gpt_neox"), bisect=True, tokens=0).verdict is None


@pytest.mark.parametrize("tp_size", [1, 2])
def test_boolean_tensors_are_not_compared(tiny, tmp_path, tp_size):
    """Apertus compares every activation with zero."""
    case = compile_export(tiny("apertus"), tmp_path / "case", tp_size=tp_size)
    assert diff(case, tiny("apertus"), bisect=True, tokens=0).verdict is None


def test_a_planted_error_names_its_layer_and_chip(broken_case, tiny_hf, tmp_path):
    families.plant(broken_case, 1, "model.layers.2.mlp.gate_up_proj.weight", 3.0)
    page = tmp_path / "r.html"
    result = CliRunner().invoke(main, ["diff", "--case_dir", str(broken_case), "--reference",
                                       str(tiny_hf), "--html", str(page), "--bisect", "--json"])
    report = json.loads(result.stdout)
    assert report["first_layer"] == "hidden_states.2"
    weight, = report["weights"]
    assert (weight["chip"], weight["layer"], weight["elements"]) == (1, 2, 1)
    assert report["first_op"].startswith("GatedMLP") and "on chip 1" in report["first_op"]
    assert report["changed_files"] == ["chip1/weights.safetensors"]
    assert result.exit_code == 1 and report["passed"] is False
    for part in ("first over tolerance: hidden_states.2", "first op over tolerance: GatedMLP",
                 "chip 1's weight 'model.layers.2.mlp.gate_up_proj.weight' of layer 2 differs",
                 "chip1/weights.safetensors changed since the compile"):
        assert part in result.stderr and part in report["verdict"]
    assert "<svg" in page.read_text() and "hidden_states.2" in page.read_text()


def test_a_weight_with_a_flipped_bit_is_found(broken_case, tiny_hf, one_export):
    name = "model.layers.3.mlp.down_proj.weight"
    with safe_open(broken_case / "chip0" / "weights.safetensors", framework="np") as file:
        first = file.get_tensor(name).flat[0]
    families.plant(broken_case, 0, name, np.nextafter(first, np.float32(9)) - first)
    rehash(broken_case)
    report = diff(broken_case, tiny_hf, bisect=True, tokens=0)
    weight, = report.weights
    assert (weight.chip, weight.name, weight.elements) == (0, name, 1)
    assert not report.changed_files and report.first_op is None
    assert report.verdict.startswith(f"chip 0's weight '{name}' of layer 3 differs in 1 element")


def test_a_rope_table_shifted_by_one_position_is_found(broken_case, tiny_hf, one_export):
    path = broken_case / "chip1" / "weights.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    for name in ("rotary.cos", "rotary.sin"):
        low, high = (start + offset for offset in header[name]["data_offsets"])
        width = (high - low) // header[name]["shape"][0]
        data[low:high] = data[low + width:high] + data[low:low + width]
    path.write_bytes(data)
    rehash(broken_case)
    report = diff(broken_case, tiny_hf, tokens=0)
    assert [weight.name for weight in report.weights] == ["rotary.cos", "rotary.sin"]
    assert "chip 1's weight 'rotary.cos' differs in" in report.verdict
    assert report.first_layer is None  # attention depends only on the distance of tokens


def test_a_missing_weight_is_found(broken_case, tiny_hf, one_export):
    path = broken_case / "chip0" / "weights.safetensors"
    name, other = b'"model.layers.1.mlp.down_proj.weight"', b'"model.layers.1.mlp.down_prod.weight"'
    path.write_bytes(path.read_bytes().replace(name, other))
    rehash(broken_case)
    report = diff(broken_case, tiny_hf, tokens=0)
    assert report.verdict == ("chip 0's weight 'model.layers.1.mlp.down_proj.weight' of layer 1 is "
                              "missing, not finite or of another shape")


@pytest.mark.parametrize("file", ["tokenizer/chat_template.jinja", "chip1/graph.onnx"])
def test_a_modified_file_is_an_error(file, broken_case, tiny_hf, one_export):
    content = bytearray((broken_case / file).read_bytes())
    content[-1] ^= 1
    (broken_case / file).write_bytes(content)  # not read by chips that run segments
    result = CliRunner().invoke(main, ["diff", "--case_dir", str(broken_case), "--reference",
                                       str(tiny_hf), "--tokens", "0"])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"error: {file} changed since the compile"
    assert f"{file} has changed since it was compiled" in result.stdout


def test_a_model_that_cannot_run_raises_an_llmc_error(broken_case, tiny_hf, one_export):
    segment = read_manifest(broken_case).chips[1].steps[0].path
    content = (broken_case / segment).read_bytes()
    for damaged, message in ((b"nonsense", "is not an ONNX graph"),
                             (content[:99], "is not an ONNX graph"), (None, "is missing")):
        (broken_case / segment).unlink()
        if damaged is not None:
            (broken_case / segment).write_bytes(damaged)
        with pytest.raises(llmc.LlmcError, match=message) as caught:
            diff(broken_case, tiny_hf)
        assert "\n" not in str(caught.value) and segment in str(caught.value)


@pytest.mark.parametrize(("plant", "op", "layer"), [
    (field("RMSNorm", "epsilon", lambda value: 10 * value), "RMSNorm", "hidden_states.0"),
    # below any layer's tolerance, but not that of the op's output
    (field("RMSNorm", "epsilon", lambda value: 3 * value), "RMSNorm", None),
    (field("CausalAttention", "scale", lambda value: 1.01 * value), "CausalAttention",
     "hidden_states.1"),
    (field("CausalAttention", "scale", lambda value: 1.002 * value), "CausalAttention", None),
    (field("CausalAttention", "window", lambda value: 23), "CausalAttention", "hidden_states.1")])
def test_a_wrong_op_attribute_is_traced_to_the_op(plant, op, layer, one_export, tiny, tmp_path):
    report = diff(compile_export(tiny("llama"), tmp_path / "case", plant=plant), tiny("llama"),
                  bisect=True, tokens=0)
    assert report.first_op.startswith(op) and not report.weights and not report.changed_files
    assert f"first op over tolerance: {op}" in report.verdict
    assert layer is None or report.first_layer == layer


def test_json_output(case_tp1, tiny_hf, one_export):
    result = CliRunner().invoke(main, ["diff", "--case_dir", str(case_tp1), "--reference",
                                       str(tiny_hf), "--json", "--prompt", "the quick fox"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and len(report["layers"]) == 15
    assert report["passed"] is True and "verdict" not in report
    assert set(report["versions"]) == {"llmc", "transformers", "torch", "onnxruntime"}
    assert (report["target"], report["dtype"], report["tp_size"]) == ("cpu", "float32", 1)


def test_differences_are_measured_against_the_range():
    found = compare("x", "a vs b", np.array([1.0, 2.0, 3.1]), np.array([1.0, 2.0, 3.0]), 0.1)
    assert found.max_abs == pytest.approx(0.1, rel=1e-5)
    assert found.relative == pytest.approx(0.05, rel=1e-5) and found.passed
    assert not compare("x", "a vs b", np.array([1.0, 2.6]), np.array([1.0, 2.0]), 0.1).passed


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_nan_is_never_within_tolerance(wrong):
    assert not compare("x", "a vs b", np.array([1.0, wrong]), np.array([1.0, 2.0]), 1e9).passed


def test_the_weight_file_names_match_the_graph(case_tp2):
    with safe_open(case_tp2 / "chip0" / "weights.safetensors", framework="np") as file:
        assert "model.layers.0.self_attn.qkv_proj.weight" in file.keys()  # noqa: SIM118


def test_another_model_as_reference_is_refused(case_tp1, tiny, one_export):
    with pytest.raises(llmc.LlmcError, match="has vocabulary size 101, .* has 300; give"):
        diff(case_tp1, tiny("llama"))


@pytest.mark.parametrize("given", [{"tolerance": -1.0}, {"tolerance": float("nan")},
                                   {"tokens": -1}])
def test_negative_option_values_are_refused(given, case_tp1, tiny_hf):
    with pytest.raises(llmc.LlmcError, match=r" is below 0"):
        diff(case_tp1, tiny_hf, **given)


def test_a_given_tolerance_applies_to_all_tensors(case_tp1, tiny_hf, one_export):
    report = diff(case_tp1, tiny_hf, tolerance=1e-9, tokens=2)
    assert allowed(report) == {"1e-09"}
    assert report.verdict.startswith("first over tolerance: hidden_states.0,")
    assert diff(case_tp1, tiny_hf, tolerance=0.5, tokens=2).token_error > 0.1


# Greedy tokens. The reference has 3, 1, 2; only logits 1 and 2 of each step matter.

LOGITS = np.array([[0.0, 0.1, 0.2, 0.9], [0.0, 1.0, 0.98, 0.5], [0.0, 0.1, 0.8, 0.3]])
REFERENCE = Greedy((3, 1, 2), LOGITS)


def test_equal_tokens_report_their_top_2_margin():
    judged = judge_tokens(lambda prompt, count: [3, 1, 2], [7], REFERENCE, 0.01)
    assert [token.margin for token in judged] == pytest.approx([0.7, 0.02, 0.5])
    assert equal(judged) and all(token.passed for token in judged)


@pytest.mark.parametrize(("error", "passed"), [(0.03, True), (0.01, False)])
def test_a_diverging_token_is_judged_by_its_margin(error, passed):
    asked = []

    def choose(prompt, count):
        asked.append((prompt, count))
        return [[3, 2, 0], None, [2]][len(prompt) - 1]

    judged = judge_tokens(choose, [7], REFERENCE, error)
    assert asked == [([7], 3), ([7, 3, 1], 1)]
    assert [(token.step, token.token, token.passed) for token in judged] == [
        (0, 3, True), (1, 2, passed), (2, 2, True)]
    assert judged[1].margin == pytest.approx(0.02)


def test_a_wrong_token_is_an_error_even_if_logits_agree(case_tp1, tiny_hf, one_export, monkeypatch):
    """For example an error in a cache that only decoding reads."""
    @contextmanager
    def wrong(root):
        yield lambda prompt, count: [17] * count

    monkeypatch.setattr(diff_module, "_greedy", wrong)
    report = diff(case_tp1, tiny_hf, tokens=4)
    assert report.first_layer is None
    first = next(token for token in report.tokens if not token.passed)
    assert report.verdict == (
        f"greedy token {first.step} is 17, expected {first.reference_token}, whose logit is "
        f"{first.margin:.3g} higher (allowed: {report.token_error:.3g})")


def test_penalties_of_generation_config_do_not_change_the_reference(case_tp1, tiny_hf, one_export,
                                                                    tmp_path, monkeypatch):
    hf = shutil.copytree(tiny_hf, tmp_path / "hf")
    (hf / "generation_config.json").write_text('{"repetition_penalty": 9.0, "max_length": 5}')
    monkeypatch.setattr(diff_module, "load", loads(tiny_hf))
    assert equal(diff(case_tp1, hf).tokens)


def test_generation_ends_at_the_end_of_the_cache(case_tp1, tiny_hf, one_export):
    report = diff(case_tp1, tiny_hf, prompt="the quick brown fox jumps " * 12, tokens=400)
    assert report.verdict is None and 0 < len(report.tokens) < 64


# The report.

@pytest.fixture
def report(tiny_hf, broken_case, one_export):
    families.plant(broken_case, 1, "model.layers.2.mlp.gate_up_proj.weight", 3.0)
    return diff(broken_case, tiny_hf, bisect=True, prompt="the lazy dog")


def test_the_table_fits_80_columns(report, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_report(replace(report, case_dir="d" * 100))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    rows = [line.split() for line in shown.splitlines()]
    for name in [*(f"hidden_states.{i}" for i in range(4)), "logits"]:
        row, = (row for row in rows if row[:1] == [name])
        assert len(row) == 6 and row[-1] == ("ok" if name[-1] in "01" else "OVER")


def test_the_html_report_is_complete_and_escaped(report, tmp_path):
    token = replace(report.tokens[0], text="<i>", reference_text="&amp;")
    report = replace(report, case_dir="<script>", tokens=(token, *report.tokens[1:]))
    write_html(report, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "<i>" not in page and "&lt;i&gt;" in page and "&amp;amp;" in page
    for pair in ("compiled vs export", "compiled vs transformers", "export vs transformers",
                 "allowed"):
        assert f">{pair}</text>" in page
    for token in report.tokens:
        assert f"<td>{token.margin:.3g}</td>" in page
    for text in (report.date, f"torch {torch.__version__}".split("+")[0], "llmc ", "onnxruntime ",
                 "transformers ", "target cpu, float32, tp_size 2", "first op over tolerance"):
        assert text in page


def test_an_unwritable_html_report_raises_an_llmc_error(report, tmp_path):
    with pytest.raises(llmc.LlmcError, match=r"cannot be written \(No such file or directory\)"):
        write_html(report, tmp_path / "no" / "r.html")


# Programs for GPUs, with NumPy interpreters as engines.

@pytest.fixture
def interpreted(monkeypatch, one_export):
    """Use interpreters instead of CUDA engines."""
    @contextmanager
    def greedy(root):
        yield Interpreters(root).greedy

    monkeypatch.setattr(diff_module, "device_count", lambda: 8)
    monkeypatch.setattr(diff_module, "GpuReplica",
                        lambda manifest, case, placements, room: Interpreters(case))
    monkeypatch.setattr(diff_module, "_greedy", greedy)


def losses(hf, dtype, tokens):
    """Return transformers' error in `dtype`, relative to the range.

    After each layer but the last or one before it, and for the logits.
    """
    runs = []
    for kind in (torch.float32, getattr(torch, dtype)):
        model = AutoModelForCausalLM.from_pretrained(hf, dtype=kind, attn_implementation="eager")
        with torch.no_grad():
            out = model.eval()(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        runs.append([x.float().numpy() for x in (*out.hidden_states[1:-1], out.logits)])
    *hidden, logits = [float(np.abs(narrow - exact).max() / np.ptp(exact))
                       for exact, narrow in zip(*runs, strict=True)]
    return [*np.maximum.accumulate(hidden), logits]


def test_tolerances_grow_monotonically_with_depth():
    exact = {"hidden_states.0": np.array([0.0, 1.0]), "hidden_states.1": np.array([0.0, 10.0]),
             "logits": np.array([0.0, 1.0])}
    narrow = {"hidden_states.0": np.array([0.0, 1.1]), "hidden_states.1": np.array([0.0, 10.5]),
              "logits": np.array([0.0, 1.01])}
    allowed = diff_module._losses(narrow, exact, 2.0)
    assert allowed == pytest.approx({"hidden_states.0": 0.2, "hidden_states.1": 2.0,
                                     "logits": 0.02})


@pytest.mark.parametrize(("family", "dtype", "tp_size"), [
    ("llama", "float32", 1), ("gpt2", "float32", 1), ("gemma2", "float16", 1),
    ("gpt2", "bfloat16", 1), ("llama", "float32", 2), ("llama", "bfloat16", 4),
    ("apertus", "bfloat16", 1), ("ministral3", "float16", 2)])
def test_an_unmodified_program_is_within_tolerance(family, dtype, tp_size, interpreted, tiny,
                                                   tmp_path):
    hf = tiny(family)
    case = compile_export(hf, tmp_path / "case", "cuda", dtype, tp_size)
    report = diff(case, hf, bisect=True)
    assert report.verdict is None and report.first_op is None
    ours = [d for d in report.layers if d.pair == "compiled vs transformers"]
    depth = len(Interpreters(case).ranks[0].caches) // 2
    assert [d.name for d in ours] == [*(f"hidden_states.{i}" for i in range(depth)), "logits"]
    if dtype == "float32":
        assert allowed(report) == {"1e-05"} and equal(report.tokens)
        return
    times = {1: 2.0, 2: 8 ** 0.5, 4: 4.0}[tp_size]  # chips round their partial sums
    assert report.allowed == f"{times:.2g} times the error of transformers in {dtype}"
    tokens = np.random.default_rng(0).integers(0, families.VOCAB, 24).tolist()
    found = [d.allowed for d in ours if d.name != f"hidden_states.{depth - 1}"]
    assert found == pytest.approx([times * loss for loss in losses(hf, dtype, tokens)], rel=1e-3)
    assert {d.allowed for d in report.layers if d.pair == "export vs transformers"} == {1e-5}
    assert all(token.passed for token in report.tokens)


@pytest.mark.parametrize(("plant", "op"), [
    (field("NormGemm", "epsilon", lambda value: 1e4 * value), "NormGemm"),
    (field("CausalAttention", "window", lambda value: 23), "CausalAttention"),
    (field("CausalAttention", "scale", lambda value: 4 * value), "CausalAttention")])
def test_in_16_bits_an_error_beyond_rounding_is_found(plant, op, interpreted, tiny, tmp_path):
    case = compile_export(tiny("llama"), tmp_path / "case", "cuda", "bfloat16", plant=plant)
    report = diff(case, tiny("llama"), bisect=True, tokens=0)
    assert report.first_op.startswith(op) and not report.weights
    assert f"first op over tolerance: {op}" in report.verdict


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float8_caches_have_a_larger_tolerance(dtype, interpreted, tiny, tmp_path):
    hf = tiny("llama")
    case = compile_export(hf, tmp_path / "case", "cuda", dtype, kv_dtype="float8_e4m3fn")
    assert read_manifest(case).kv_dtype == "float8_e4m3fn"
    report = diff(case, hf, bisect=True)
    assert report.verdict is None
    assert report.allowed == (f"2 times the error of transformers in {dtype} with a KV cache in "
                              f"float8_e4m3fn")
    ours = [d for d in report.layers if d.pair == "compiled vs transformers"]
    assert all(1e-4 < d.relative < d.allowed < 0.1 for d in ours)
    broken = compile_export(hf, tmp_path / "broken", "cuda", dtype, kv_dtype="float8_e4m3fn",
                            plant=field("CausalAttention", "window", lambda value: 8))
    assert diff(broken, hf, bisect=True, tokens=0).first_op.startswith("CausalAttention")


@pytest.mark.parametrize(("dtype", "kv_dtype", "told"), [
    ("float32", "", "1e-05 of a tensor's range"),
    ("bfloat16", "", "3 times the error of the export in bfloat16"),
    ("float16", "float8_e4m3fn",
     "3 times the error of the export in float16 with a KV cache in float8_e4m3fn")])
def test_an_onnx_reference_is_measured_by_the_export(dtype, kv_dtype, told, interpreted, tiny,
                                                     tmp_path, monkeypatch):
    hf = tiny("llama")
    monkeypatch.setattr(diff_module, "load", loads(kind="onnx"))
    case = compile_export(hf, tmp_path / "case", "cuda", dtype, kv_dtype=kv_dtype)
    report = diff(case, hf, bisect=True)
    assert report.verdict is None and report.allowed == told
    assert {d.pair for d in report.layers} == {"compiled vs export"}
    if dtype == "float32":
        model = AutoModelForCausalLM.from_pretrained(hf).eval()
        prompt = torch.from_numpy(np.random.default_rng(0).integers(0, families.VOCAB, 24))[None]
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                             max_new_tokens=16, eos_token_id=None)
        assert [token.token for token in report.tokens] == out[0, 24:].tolist()
    broken = compile_export(hf, tmp_path / "broken", "cuda", dtype, kv_dtype=kv_dtype,
                            plant=field("CausalAttention", "window", lambda value: 8))
    assert diff(broken, hf, tokens=0).first_layer == "hidden_states.1"


def test_float8_tolerance_defaults_to_a_tenth_of_the_range(interpreted, tiny, tmp_path,
                                                           monkeypatch):
    """For an .onnx reference, whose attention is not a single op."""
    hf = tiny("llama")
    monkeypatch.setattr(diff_module, "load", loads(kind="onnx"))
    monkeypatch.setattr(diff_module, "_can_round", lambda graph, kv_dtype: False)
    case = compile_export(hf, tmp_path / "case", "cuda", kv_dtype="float8_e4m3fn")
    report = diff(case, hf, tokens=0)
    assert report.verdict is None and allowed(report) == {"0.1"}
    assert report.allowed.startswith("0.1 of a tensor's range, as the export cannot run in")


def test_an_overflowing_reference_cannot_be_compared(interpreted, tiny, tmp_path, monkeypatch):
    hf = tiny("llama")
    real = diff_module.reference_values

    def overflowing(model, ids, kv_dtype=""):
        values = real(model, ids, kv_dtype)
        if model.dtype == torch.float16:
            values["hidden_states.1"] = values["hidden_states.1"] * np.inf
        return values

    monkeypatch.setattr(diff_module, "reference_values", overflowing)
    case = compile_export(hf, tmp_path / "case", "cuda", "float16")
    report = diff(case, hf, tokens=0)
    assert "the reference is not finite in float16 at hidden_states.1" in report.verdict
    assert "give --tolerance" in report.verdict
    assert diff(case, hf, tokens=0, tolerance=0.1).verdict is None


def test_a_long_prompt_is_traced_in_steps(interpreted, tiny_hf, tmp_path, monkeypatch):
    case = compile_export(tiny_hf, tmp_path / "case", "cuda")
    monkeypatch.setattr(diff_module, "MAX_LOGITS", 5)
    assert diff(case, tiny_hf, bisect=True, tokens=0).verdict is None
    with pytest.raises(llmc.LlmcError, match=r"has \d+ tokens, expected at most .* 64; shorten"):
        diff(case, tiny_hf, prompt="the quick brown fox " * 60)


@pytest.mark.parametrize(("family", "weight", "op"), [
    ("llama", "model.layers.1.mlp.gate_up_proj.weight.normed", "NormGemm"),
    ("gpt2", "transformer.h.1.attn.c_proj.weight", "GemmBiasRes")])
def test_a_planted_error_in_a_schedule_s_weights_names_its_node(family, weight, op, interpreted,
                                                                tiny, tmp_path):
    case = compile_export(tiny(family), tmp_path / "case", "cuda")
    families.plant(case, 0, weight, 3.0)
    report = diff(case, tiny(family), bisect=True, tokens=0)
    assert report.first_layer == "hidden_states.1" and report.first_op.startswith(op)
    bad, = report.weights
    assert (bad.name, bad.layer, bad.elements) == (weight, 1, 1)
    assert "hidden_states.1" in report.verdict and weight in report.verdict


def test_diff_of_a_gpu_target_needs_a_gpu(tiny_hf, one_export, tmp_path, monkeypatch):
    case = compile_export(tiny_hf, tmp_path / "case", "cuda", "bfloat16")
    monkeypatch.setattr("llmc.runtime.engines.cuda.find_spec", lambda name: None)
    with pytest.raises(llmc.LlmcError, match="has no CUDA engine; install it"):
        diff(case, tiny_hf)
