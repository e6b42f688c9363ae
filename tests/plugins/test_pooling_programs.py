"""Embedding models and classifiers as programs of the CUDA engine, run in NumPy."""

from dataclasses import replace

import numpy as np
import pooling
import pytest
from declared_programs import build, schedules_of
from schedule_interpreter import LIMITS, interpreted

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.artifacts.program import read_chip_programs
from llmc.errors import LlmcError
from llmc.runtime.core.pooling import Input
from llmc.runtime.core.step import Step
from llmc.runtime.engines.cuda import step_arrays

LENGTHS = (5, 1, 17, 40, 9)
FIELDS = {**pooling.ENCODERS, **pooling.DECODERS}
# Families whose structure another one has too are for `make test-all`.
SELECTED = {("bert", "token_classify"), ("roberta", "embed"), ("distilbert", "classify"),
            ("mpnet", "embed"), ("modernbert", "embed"), ("nomic_bert", "embed"),
            ("eurobert", "embed"), ("qwen3", "embed"), ("qwen3", "classify"),
            ("gemma3_text", "embed")}
CASES = [(name, task) for name in FIELDS if name not in pooling.REFUSED
         for task in ("embed", *pooling.CLASSIFIERS.get(name, ()))]


def compiled(tmp_path, name, task="embed", kind=None, **options):
    """A case directory, the model and its pooling."""
    kind = kind or ("last" if name in pooling.DECODERS else "mean")
    kind, labels = (kind, {}) if task == "embed" else ("", {"num_labels": 3})
    model = pooling.save(name, FIELDS[name], tmp_path / "hf", task, kind, **labels)
    llmc.compile(tmp_path / "hf", tmp_path / "case", target="cuda", dtype="float32", **options)
    return tmp_path / "case", model, kind


def check(extension, case, model, kind, types=(), **limits):
    """The engine accepts the programs; rows together, and of one alone, equal transformers'."""
    manifest = read_manifest(case)
    for rank in range(manifest.tp_size):
        build(extension, manifest, schedules_of(case, rank))
    inputs = [Input(ids, own) for ids, own in zip(
        pooling.texts(LENGTHS), types or [()] * len(LENGTHS), strict=True)]
    expected = [pooling.reference(model, own.token_ids, kind, own.token_type_ids)
                for own in inputs]
    with interpreted(case, replace(LIMITS, whole=manifest.is_whole, **limits)) as llm:
        pooling.assert_rows(llm.pool(inputs), expected, 1e-5)
        pooling.assert_rows(llm.pool(inputs[3:4]), expected[3:4], 1e-5)


@pytest.mark.parametrize(("name", "task"), [
    pytest.param(*case, marks=[] if case in SELECTED else [pytest.mark.thorough])
    for case in CASES])
def test_programs_give_the_rows_of_transformers(extension, name, task, tmp_path):
    check(extension, *compiled(tmp_path, name, task))


@pytest.mark.parametrize("kind", ["cls", "last"])
def test_every_pooling_runs_on_two_ranks(extension, kind, tmp_path):
    check(extension, *compiled(tmp_path, "bert", kind=kind, tp_size=2))


def test_token_types_are_those_of_the_request(extension, tmp_path):
    halves = [[0] * (n // 2) + [1] * (n - n // 2) for n in LENGTHS]
    check(extension, *compiled(tmp_path, "bert", "classify", tp_size=3), types=halves)


def test_a_causal_model_takes_texts_in_chunks(extension, tmp_path):
    check(extension, *compiled(tmp_path, "qwen3"), max_tokens=16, max_slots=4)


def test_projections_of_an_encoder_are_one_gemm(tmp_path):
    case, _, _ = compiled(tmp_path, "bert")
    program, = schedules_of(case)
    attention = next(node for node in program.nodes if node.op == "BidirectionalAttention")
    views = [program.tensors[number] for number in attention.inputs[:3]]
    assert {view.kind for view in views} == {"columns"} and len({view.of for view in views}) == 1


def rows_of(manifest, batch=2, **changes):
    step = replace(Step.of([[5, 6, 7]] * batch, [0] * batch, [[1, 2]] * batch, range(batch),
                           logits="pooled"), **changes)
    return (4, *step_arrays(step))


def test_steps_are_checked_before_they_run(extension, tmp_path):
    case, _, _ = compiled(tmp_path, "bert", "classify")
    manifest = read_manifest(case)
    program = build(extension, manifest, schedules_of(case))
    program.check_step(*rows_of(manifest))
    program.check_step(*rows_of(manifest, token_type_ids=np.array([0, 0, 1, 0, 1, 1])))
    for types, message in (([0, 1], "token_type_ids has 2 elements, expected 6"),
                           ([0, 0, 0, 0, 0, -1], r"token_type_ids\[5\] is -1, expected 0 to")):
        with pytest.raises(extension.CudaError, match=message):
            program.check_step(*rows_of(manifest, token_type_ids=np.array(types)))


def test_pooled_rows_are_a_value_of_the_expected_size(extension, tmp_path):
    case, _, _ = compiled(tmp_path, "bert")
    manifest = read_manifest(case)
    schedule, = schedules_of(case)
    narrow = replace_pooling(manifest, width=63)
    with pytest.raises(LlmcError, match=r"the pooled rows are 'pooled' \['batch', 64\], expected "
                                        r"\['batch', 63\]"):
        read_chip_programs(narrow, narrow.chips[0], case)
    program = build(extension, manifest, [schedule])
    with pytest.raises(extension.CudaError, match="is not a value with num_logits rows"):
        program.set_logits(schedule.logits, 64)
    weight = next(number for number, own in enumerate(schedule.tensors) if own.kind == "weight")
    with pytest.raises(extension.CudaError, match="is not a value with batch or num_tokens rows"):
        program.set_pooled(weight)


def replace_pooling(manifest, **changes):
    pooled = manifest.pooling.model_copy(update=changes)
    return manifest.model_copy(update={"pooling": pooled})
