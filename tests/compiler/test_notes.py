"""Notes of passes are typed, counted and printed; passes are not identified by name.
"""

from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs
import pytest

import llmc
from llmc.compiler import lower
from llmc.compiler.graph.notes import Context, CountedNote, VocabularySize
from llmc.compiler.graph.rewrite import NoMatch, Report
from llmc.compiler.passes.attention import attention
from llmc.compiler.quant import notes
from llmc.compiler.requirements import require_attention

CPU, GPU = Context("float32", "cpu", False), Context("bfloat16", "cuda", True)
KINDS = [kind for kind in vars(notes).values()
         if isinstance(kind, type) and issubclass(kind, CountedNote) and kind is not CountedNote]


def test_notes_of_one_class_are_summed_into_the_counts():
    report = Report("quantize")
    report.count("int4, groups of 32")
    for note in (notes.Dequantized(), notes.Dequantized(2), notes.ExpertsAsInt8()):
        report.note(note)
    assert report.noted(notes.Dequantized) == notes.Dequantized(3)
    assert report.noted(notes.LayersNotQuantized) is None
    assert report.matches == {"int4, groups of 32": 1, "dequantised": 3, "MXFP4 as int8": 1}


def test_a_vocabulary_size_in_a_note_is_not_summed():
    report = Report("pad_vocabulary")
    report.note(VocabularySize(100))
    found = report.noted(VocabularySize)
    assert found is not None and found.rows == 100 and report.matches == {}
    assert report.texts(CPU) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_note_is_one_line_with_its_count(kind):
    text = kind(7).text(GPU)
    assert "\n" not in text and (not text or "7" in text or kind is notes.Float8Dequantized)
    assert text or kind.key


def test_gpu_notes_are_omitted_for_the_cpu_target():
    report = Report("quantize")
    for kind in KINDS:
        report.note(kind())
    silent = {*report.texts(GPU)} - {text.replace("float32", "bfloat16").replace("cpu", "cuda")
                                     for text in report.texts(CPU)}
    assert len(silent) == 3 and all("FP8" in text for text in silent)


def test_compile_phases_are_not_identified_by_name(tiny_hf, tmp_path, monkeypatch):
    monkeypatch.setattr(lower, "_FUSE", tuple(
        step if isinstance(step, lower.Requirement) else replace(step, name=f"step {number}")
        for number, step in enumerate(lower._FUSE)))
    manifest = llmc.compile(tiny_hf, tmp_path / "case")
    assert (manifest.dims.vocab_size, manifest.dims.padded_vocab_size) == (300, 320)
    assert all("vocab_size" not in report.matches for report in manifest.passes)


@pytest.mark.parametrize(("part", "reason"),
                         [("", "its mask is odd"), ("encoder", r"\(the graph")])
def test_the_attention_pass_must_find_attention(part, reason):
    """For any pass name; for decoders, regardless of refusals in an encoder's graph."""
    node = gs.Node("Softmax", "probabilities", inputs=[gs.Variable("scores", np.float32)],
                   outputs=[gs.Variable("weights", np.float32)])
    report = Report("step 7", attention, part)
    report.refuse(node, NoMatch("its mask is odd"))
    with pytest.raises(llmc.LlmcError, match=rf"attention was not recognized: .*{reason}"):
        require_attention([gs.Graph([node])], [report])
