"""Encoders of audio: what is compiled, and what is refused by name."""

import dataclasses
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import families
import ml_dtypes
import numpy as np
import onnx
import pytest
import speech
import torch
from declared_programs import build, schedules_of
from schedule_interpreter import LIMITS, Interpreter, interpreted

import llmc
from llmc.artifacts.manifest import PROCESSOR, read_manifest
from llmc.runtime.collectives import Communicator
from llmc.runtime.engines.cuda import encoder_arrays
from llmc.runtime.multimodal.feature_rows import make_rows
from llmc.runtime.multimodal.processor import read_processor
from llmc.runtime.sampling.speech_fallback import SpeechOptions


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


@pytest.fixture(scope="module")
def device_case(tiny_speech, tmp_path_factory):
    case = tmp_path_factory.mktemp("device") / "case"
    llmc.compile(tiny_speech[1], case, target="cuda")
    return case


def rows_of(case, waveform):
    rows = read_manifest(case).encoder.features
    extractor = read_processor(case / PROCESSOR).description.audio.extractor
    features = np.ascontiguousarray(extractor.features(extractor.window(waveform)).T)
    return features, make_rows(features, rows)


def logits_of(model, features, tokens):
    with torch.no_grad():
        return model(input_features=torch.from_numpy(features.T[None]),
                     decoder_input_ids=torch.tensor([tokens])).logits[0].numpy()


TOKENS = [2, 60, 63, 70, 30, 31, 32]


def test_the_programs_for_gpus_give_transformers_logits(device_case, tiny_speech):
    interpreter = Interpreter(device_case)
    ops = [node.op for node in interpreter.encoder.nodes]
    assert ops.count("BidirectionalAttention") == 2 and ops.count("GemmBiasAct") >= 5
    for seed, start in ((3, 11), (1, 0)):
        features, rows = rows_of(device_case, speech.sound(0.9, seed))
        memory = interpreter.encode(rows, start)
        logits = [interpreter.run(TOKENS[:4], 0, memory), interpreter.run(TOKENS[4:], 4, memory)]
        families.assert_close(np.concatenate(logits), logits_of(tiny_speech[0], features, TOKENS))


def test_programs_of_two_ranks_give_transformers_logits(tiny_speech, tmp_path):
    llmc.compile(tiny_speech[1], tmp_path / "case", target="cuda", tp_size=2)
    communicator = Communicator(2)
    features, rows = rows_of(tmp_path / "case", speech.sound(0.9, 3))

    def run(rank):
        interpreter = Interpreter(tmp_path / "case", rank, communicator)
        return interpreter.run(TOKENS, 0, interpreter.encode(rows, 0))
    with ThreadPoolExecutor(2) as threads:
        for logits in threads.map(run, range(2)):
            families.assert_close(logits, logits_of(tiny_speech[0], features, TOKENS))


def test_the_loop_transcribes_with_programs_for_gpus(device_case, tiny_speech):
    waveform, options = speech.sound(1.7, 3), SpeechOptions(
        logprob_threshold=-50.0, no_speech_threshold=0.9, compression_ratio_threshold=9.0)
    limits = dataclasses.replace(LIMITS, max_slots=2, ahead=2)
    with llmc.LLM(tiny_speech[2]) as host, interpreted(device_case, limits) as llm:
        for own in (None, options):
            expected = host.transcribe(waveform, timestamps=True, options=own)
            found = llm.transcribe(waveform, timestamps=True, options=own)
            assert (found.text, found.language) == (expected.text, expected.language)
            assert [one.token_ids for one in found.segments] == [
                one.token_ids for one in expected.segments]
            np.testing.assert_allclose(
                [(one.avg_logprob or 0, one.no_speech_prob or 0) for one in found.segments],
                [(one.avg_logprob or 0, one.no_speech_prob or 0) for one in expected.segments],
                atol=1e-4)
        short = speech.sound(0.8, 1)
        assert llm.transcribe(short, language="de") == host.transcribe(short, language="de")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_engine_accepts_the_programs_and_checks_rows(dtype, extension, tiny_speech, tmp_path):
    manifest = llmc.compile(tiny_speech[1], tmp_path / "case", target="cuda", dtype=dtype)
    program = build(extension, manifest, schedules_of(tmp_path / "case"))
    rows = [np.random.default_rng(0).standard_normal((50, 81), np.float32)] * 2
    ids, features = encoder_arrays(rows, dtype)
    kind = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    np.testing.assert_array_equal(features.view(kind), np.concatenate(rows).ravel().astype(kind))
    offsets = np.tile(np.arange(50), 2)
    given = {"input_ids": ids, "features": features, "position_ids": offsets,
             "cu_seqlens": np.array([0, 50, 100], np.int32), "memory_rows": np.arange(100)}
    program.check_encode(*given.values())
    for wrong, match in (({"input_ids": offsets}, "input_ids"),
                         ({"features": features[:-1]}, "features"),
                         ({"position_ids": offsets + 1}, "position_ids"),
                         ({"memory_rows": np.arange(100) + 60}, "memory_rows")):
        with pytest.raises(extension.CudaError, match=match):
            program.check_encode(*{**given, **wrong}.values())


@pytest.mark.parametrize(("options", "match"), [
    ({"target": "tensorrt"}, "reads audio, which target 'tensorrt' does not support; compile wi"),
    ({"mem_max_seq_len": 40}, "mem_max_seq_len 40 is not supported: .* reads 50 rows of audio"),
])
def test_unsupported_options_are_refused(options, match, tiny_speech, tmp_path, monkeypatch):
    monkeypatch.setattr("llmc.compiler.targets.tensorrt.describe", lambda options: None)
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
