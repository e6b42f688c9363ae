"""Audio in prompts: features, masks and tokens are those of transformers' processors."""

import numpy as np
import pytest
import transformers
from processor_checkpoints import FAMILIES, SECONDS, speech_of
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor
from transformers_processors import load_processor, text_of

from llmc.errors import LlmcError

TOLERANCE = 1e-4  # transformers computes features in float32


@pytest.mark.parametrize(("family", "seconds"), [
    ("qwen2_audio", SECONDS), ("qwen2_audio", (30.0,)), ("audioflamingo3", (0.5,)),
    ("audioflamingo3", (31.7,)), ("glmasr", (3.21,)), ("glmasr", (59.99,))])
def test_clips_give_the_features_and_tokens_of_transformers(family, seconds, checkpoints,
                                                            processors):
    own, (folder, tokenizer) = processors[family], checkpoints[family]
    clips = [speech_of(each) for each in seconds]
    text = text_of(own.placeholders["audio"], len(clips))
    expected = load_processor(FAMILIES[family], folder)(text=text, audio=clips,
                                                        sampling_rate=16_000)
    items = own.process_audio(clips)
    ids = tokenizer.encode(own.expand_text(text, items), add_special_tokens=False).ids
    assert ids == np.asarray(expected["input_ids"])[0].tolist()
    assert [len(place.positions) for place in own.locate(ids, items)] == [
        item.num_rows for item in items]
    for name in items[0].arrays:
        joined, other = np.concatenate([item.arrays[name] for item in items]), expected[name]
        assert joined.shape == tuple(other.shape)
        assert np.abs(joined - np.asarray(other)).max() < TOLERANCE


@pytest.mark.parametrize("seconds", [0.5, 31.7])
def test_voxtral_computes_features_before_it_cuts_windows(seconds, processors):
    """Its processor takes audio by mistral-common only, so its method for features is called."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    owner = type("Owner", (), {"feature_extractor": extractor})
    expected = VoxtralProcessor._retrieve_input_features(
        owner, [speech_of(seconds)], 3000, sampling_rate=16_000, padding=True, truncation=False,
        pad_to_multiple_of=480_000, return_tensors="pt")
    item, = processors["voxtral"].process_audio([speech_of(seconds)])
    features = item.arrays["input_features"]
    assert features.shape == tuple(expected.shape) and item.num_rows == 375 * len(features)
    assert np.abs(features - np.asarray(expected)).max() < TOLERANCE


def test_longer_clips_than_transformers_reads_are_refused(processors):
    with pytest.raises(LlmcError, match="takes at most 60 s; split it"):
        processors["glmasr"].process_audio([np.zeros(61 * 16_000, np.float32)])


@pytest.mark.parametrize(("family", "mask", "axis", "seconds"), [
    ("qwen2_5_omni", "feature_attention_mask", 1, SECONDS),
    ("qwen2_5_omni", "feature_attention_mask", 1, (30.0,)),
    ("qwen3_omni", "feature_attention_mask", 1, (0.5,)),  # others would pad it
    ("qwen3_omni", "feature_attention_mask", 1, (31.7,)),
    ("gemma4", "input_features_mask", 0, SECONDS)])
def test_frames_of_padding_are_left_out(family, mask, axis, seconds, checkpoints, processors):
    own, (folder, tokenizer) = processors[family], checkpoints[family]
    clips = [speech_of(each) for each in seconds]
    text = text_of(own.placeholders["audio"], len(clips))
    expected = load_processor(FAMILIES[family], folder)(
        text=[text], audio=clips, sampling_rate=16_000, add_special_tokens=False)
    items = own.process_audio(clips)
    ids = tokenizer.encode(own.expand_text(text, items), add_special_tokens=False).ids
    assert ids == np.asarray(expected["input_ids"])[0].tolist()
    assert sum(len(place.positions) for place in own.locate(ids, items)) == sum(
        item.num_rows for item in items)
    for item, features, frames in zip(items, np.asarray(expected["input_features"]),
                                      np.asarray(expected[mask]), strict=True):
        count = int(frames.sum())
        assert frames[:count].all() and item.arrays[mask].shape == (1, count)
        assert item.arrays[mask].all()
        difference = item.arrays["input_features"][0] - features.take(range(count), axis)
        assert np.abs(difference).max() < TOLERANCE


def test_clips_without_a_token_are_refused(processors):
    with pytest.raises(LlmcError, match="audio clip 1 is too short for a token; give a longer"):
        processors["qwen2_5_omni"].process_audio([speech_of(0.5), np.zeros(300, np.float32)])
