"""Byte-level tokenizers in the forms of families, and difficult texts."""

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SAMPLES = [
    "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇫🇷🇯🇵", "🙂", "東京都に行きました。", "你好，世界！",
    "한국어 텍스트", "नमस्ते दुनिया", "مرحبا بالعالم", "שלום", "ไทย", "naïve café",
    "e\u0301a\u0308o\u0302", "Z\u0337\u0322\u031ba\u0334", "the quick brown fox ", "\n\n",
    "\t", "  ", "0.5€", "𝕌𝕟𝕚", "\ufffd", "\u200b", "END", "</s>",
]
TEXTS = st.lists(st.sampled_from(SAMPLES) | st.text(max_size=6), max_size=8).map("".join)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(SAMPLES * 3, trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def byte_fallback():
    """Byte fallback as in Llama 2: words start with ▁, unknown characters are bytes."""
    vocab = [*BYTES, "▁", *"thequickbrownfx", "th", "the", "▁the"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)},
                                     [("t", "h"), ("th", "e"), ("▁", "the")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"),
                                                 normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                           decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer
