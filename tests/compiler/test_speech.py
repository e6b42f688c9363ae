"""Encoders of audio: what is compiled, and what is refused by name."""

import json
import shutil

import onnx
import pytest

import llmc
from llmc.artifacts.manifest import read_manifest


def test_the_convolutions_become_products_of_rows(tiny_speech):
    _, _, case = tiny_speech
    manifest = read_manifest(case)
    features = manifest.encoder.features
    assert (features.num_channels, features.num_frames, features.num_rows) == (16, 100, 50)
    assert (features.stride, features.offset, features.window) == (2, -2, 5)
    inputs = {tensor.name: tensor for tensor in manifest.chips[0].encoder.inputs}
    assert inputs["input_features"].shape == ("num_tokens", 5 * 16 + 1)
    assert inputs["input_features"].dtype == "float32" and "input_ids" not in inputs
    graph = onnx.load(case / "chip0" / "encoder.onnx", load_external_data=False).graph
    ops = [node.op_type for node in graph.node]
    assert not {"Conv", "Transpose", "Reshape", "MatMul", "Gemm"} & {*ops}
    assert ops.count("BidirectionalAttention") == 2


def test_the_manifest_has_the_special_tokens(tiny_speech):
    speech = read_manifest(tiny_speech[2]).encoder.speech
    assert speech.languages == {"en": 60, "de": 61}
    assert speech.tasks == {"transcribe": 63, "translate": 64}
    assert speech.begin_suppress_tokens == (5, 1)
    assert (speech.no_timestamps_token_id, speech.max_initial_timestamp_index) == (70, 20)


@pytest.mark.parametrize(("options", "match"), [
    ({"target": "cuda"}, "reads audio, which target 'cuda' does not support; compile with --targ"),
    ({"mem_max_seq_len": 40}, "mem_max_seq_len 40 is not supported: .* reads 50 rows of audio"),
])
def test_unsupported_options_are_refused(options, match, tiny_speech, tmp_path, monkeypatch):
    monkeypatch.setattr("llmc.compiler.targets.cuda.describe", lambda options: None)
    with pytest.raises(llmc.LlmcError, match=match):
        llmc.compile(tiny_speech[1], tmp_path / "case", **options)


def test_a_multilingual_model_without_tokens_of_languages_is_refused(tiny_speech, tmp_path):
    shutil.copytree(tiny_speech[1], tmp_path / "hf")
    path = tmp_path / "hf" / "generation_config.json"
    given = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in given.items() if key != "lang_to_id"}))
    with pytest.raises(llmc.LlmcError, match="has no lang_to_id, without which the decoder of a"):
        llmc.compile(tmp_path / "hf", tmp_path / "case")


@pytest.mark.parametrize(("settings", "match"), [
    ({"chunk_length": 2}, "makes 200 frames of 16, the encoder reads 100 of 16"),
    ({"feature_extractor_type": "ClapFeatureExtractor"},
     "the feature extractor ClapFeatureExtractor is not supported"),
    (None, "has no processor_config.json and no preprocessor_config.json"),
])
def test_an_unfit_feature_extractor_is_refused(settings, match, tiny_speech, tmp_path):
    shutil.copytree(tiny_speech[1], tmp_path / "hf")
    path = tmp_path / "hf" / "preprocessor_config.json"
    given = json.loads(path.read_text())
    path.unlink()
    if settings is not None:
        path.write_text(json.dumps(given | settings))
    with pytest.raises(llmc.LlmcError, match=match):
        llmc.compile(tmp_path / "hf", tmp_path / "case")
