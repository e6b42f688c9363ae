"""Audio encoders are traced for one clip: its chunks are those of transformers."""

import pytest
import torch
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from llmc.compiler.frontend.one_clip import one_clip

N_WINDOW, N_WINDOW_INFER = 50, 300


def chunks_of(module, frames):
    """What a model's functions give for a clip."""
    features = torch.arange(2 * frames, dtype=torch.float32).reshape(2, frames)
    lengths = torch.tensor([frames])
    padded, of_chunks = module.chunk_and_pad_features(features, lengths, N_WINDOW)
    if module is modeling_qwen2_5_omni:
        return (padded, of_chunks, module.get_valid_indices(of_chunks),
                module.get_pool_indices(lengths), module.get_audio_cu_seqlens(of_chunks))
    return (padded, of_chunks, module.get_valid_indices(of_chunks, N_WINDOW),
            module.get_audio_cu_seqlens(of_chunks, lengths, N_WINDOW_INFER, N_WINDOW))


@pytest.mark.parametrize("frames", [3, 50, 99, 100, 101, 200, 437, 1200])
@pytest.mark.parametrize("module", [modeling_qwen2_5_omni, modeling_qwen3_omni_moe])
def test_chunks_of_one_clip_are_those_of_transformers(module, frames):
    expected = chunks_of(module, frames)
    with one_clip(module):
        found = chunks_of(module, frames)
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == other.dtype and torch.equal(own, other)
    assert chunks_of(module, frames)[0].shape == expected[0].shape  # restored
