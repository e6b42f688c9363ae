"""Tables of the documentation equal those of the tests and the code."""

import ast
import re
from pathlib import Path

import audio_models
import families
import generate
import image_models
import omni_models
import pytest

from llmc.artifacts.manifest import Manifest
from llmc.compiler.quant import readers
from llmc.targets import TARGETS

DOCS = Path(__file__).parents[2] / "docs"
ALL = {**families.FAMILIES, **families.LATENT, **families.OWN_ATTENTION, **families.MIXTURES,
       **families.HYBRIDS}
TWO = {**families.UNPLANNED, **dict.fromkeys(families.UNPLANNED_MIXTURES), **{
    kind: None for kind, _ in {**families.ENCODER_DECODERS,
                               **families.UNPLANNED_ENCODER_DECODERS}.values()}}


def rows(page, head):
    """Return the cells of the table with this first column."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {head} |")) + 2
    for line in lines[start:]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture(scope="module")
def documented():
    """Return tp sizes and targets by model type."""
    found = {}
    for _, types, sizes, targets, _ in rows("models.md", "family"):
        for kind in re.findall(r"`([^`]+)`", types):
            assert kind not in found, f"{kind} is listed twice"
            found[kind] = [int(size) for size in sizes.split(", ")], targets.split(", ")
    return found


def test_the_families_are_those_that_tests_compile(documented):
    assert set(documented) == {*ALL, *TWO}


def test_the_models_that_take_images_are_those_that_tests_compile():
    listed = [kind for _, types, *_ in rows("guides/images.md", "model | model types")
              for kind in re.findall(r"`([^`]+)`", types)]
    assert sorted(listed) == sorted({name.removesuffix("_large") for name in image_models.MODELS})


def test_the_models_that_take_audio_are_those_that_tests_compile():
    listed = [kind for _, types, *_ in rows("guides/audio.md", "model | model types")
              for kind in re.findall(r"`([^`]+)`", types)]
    assert sorted(listed) == sorted([*audio_models.MODELS, *omni_models.THINKERS])


def test_the_tp_sizes_are_those_that_tests_compile(documented):
    for kind, (sizes, _) in documented.items():
        heads = ALL[kind].get("num_attention_heads", ALL[kind].get("n_head", 4)) \
            if kind in ALL else 2
        assert sizes == [size for size in (1, 2, 3, 4) if size <= heads], kind


def test_the_targets_are_those_that_have_kernels(documented):
    for kind, (_, targets) in documented.items():
        able = [name for name in ("cpu", "cuda", "tensorrt")
                if (kind not in families.LATENT or TARGETS[name].latent_caches)
                and (kind not in families.HYBRIDS or TARGETS[name].recurrent_state)
                and (kind != "gemma4_text" or TARGETS[name].shared_caches)]
        assert targets == able, kind


def test_the_checkpoint_formats_are_those_that_are_read():
    named = {name for row in rows("formats.md", "format (`quant_method`)")
             for name in re.findall(r"`([^`]+)`", row[0])}
    assert named - {"desc_act", "weight_g_idx"} == {*readers.registry()}


def test_the_dtypes_of_targets_are_those_of_the_code():
    documented, readme = ({row[0].strip("`"): row for row in rows(page, "target")}
                          for page in ("guides/compile.md", "../README.md"))
    assert {*documented} == {*readme} == {*TARGETS}
    for name, target in TARGETS.items():
        assert readme[name][2] == documented[name][2]
        assert documented[name][2].split(", ") == [*target.dtypes]
        assert ("float8_e4m3fn" in documented[name][3]) == bool(target.kv_dtypes)


def test_the_fields_of_the_manifest_are_those_of_the_code():
    named = {name for row in rows("artifact-format.md", "field")
             for name in re.findall(r"`([^`]+)`", row[0])}
    assert named == {*Manifest.model_fields}


def test_the_errors_of_the_troubleshooting_page_are_those_of_the_code():
    texts = "\n".join(_literals())
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    for symptom in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE):
        for quoted in re.findall(r'"([^"]+)"', symptom):
            for part in re.split(r"…|\b[MNXY]\b", quoted):  # placeholders
                assert part.strip() in texts, quoted


def _literals():
    """Yield each string of the code, with a space for each formatted value."""
    for folder in ("artifacts", "compiler", "llmc/cli", "runtime", "server"):
        for path in (DOCS.parent / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield " ".join(part.value for part in node.values
                                   if isinstance(part, ast.Constant))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_the_readmes_number_of_model_classes_is_that_of_the_sweep():
    counts = dict(re.findall(r"^\| (\w+) \| (\d+) \|", generate.sweep(), re.MULTILINE))
    match = re.search(r"(\d+) of (\d+) causal LM classes",
                      (DOCS.parent / "README.md").read_text(encoding="utf-8"))
    assert match[1] == counts["matches"]
    assert int(match[2]) == sum(map(int, counts.values()))
