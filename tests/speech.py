"""A tiny random Whisper, its Hugging Face directory, and audio."""

from pathlib import Path

import numpy as np
import torch
from ctranslate2 import write_processor
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import WhisperConfig, WhisperForConditionalGeneration

VOCAB, POSITIONS, CHANNELS = 121, 28, 16
NO_TIMESTAMPS = 70
WINDOW = 1.0  # seconds
SENTENCES = Path(__file__).parent / "audio" / "sentences.ogg"  # by espeak-ng, 16,000 Hz


def tiny_whisper(directory, **generation):
    """A random model with different output for each window; saved to a directory."""
    config = WhisperConfig(
        vocab_size=VOCAB, d_model=64, encoder_layers=2, decoder_layers=3,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
        decoder_ffn_dim=96, max_target_positions=POSITIONS, max_source_positions=50,
        num_mel_bins=CHANNELS, pad_token_id=0, bos_token_id=0, eos_token_id=1,
        decoder_start_token_id=2, begin_suppress_tokens=None, suppress_tokens=None)
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        gain = parameter.dim() == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, float(gain), 0.35 if parameter.dim() > 1 else 0.1,
                              generator)
    own = model.generation_config
    own._from_model_config = False  # otherwise transformers ignores the rest
    for key, value in {
            "begin_suppress_tokens": [5, 1], "suppress_tokens": [7, 9],
            "no_timestamps_token_id": NO_TIMESTAMPS, "max_initial_timestamp_index": 20,
            "is_multilingual": True, "lang_to_id": {"<|en|>": 60, "<|de|>": 61},
            "task_to_id": {"transcribe": 63, "translate": 64}, "prev_sot_token_id": 66,
            "max_length": POSITIONS, **generation}.items():
        setattr(own, key, value)
    model.save_pretrained(directory)
    write_processor(directory, feature_size=CHANNELS, chunk_length=int(WINDOW))
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, "w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    return model


def sound(seconds, seed, rate=16_000):
    """A wavering tone with noise: float32 [samples]."""
    time = np.arange(int(rate * seconds)) / rate
    noise = np.random.default_rng(seed).standard_normal(len(time))
    tone = np.sin(2 * np.pi * (200 + 300 * seed) * time * (1 + 0.3 * np.sin(3 * time)))
    return (0.3 * tone * np.sin(7 * time + seed) + 0.05 * noise).astype(np.float32)
