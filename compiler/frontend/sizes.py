"""Upper limits of sizes in a model's config or GGUF metadata.

transformers allocates lists and modules by the config before weights are read, so a config of 10^9
layers would exhaust memory before a missing tensor is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmc.errors import LlmcError
from llmc.limits import MAX_POSITIONS

_KEYS: Mapping[int, tuple[str, ...]] = {
    2048: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers",
           "encoder_layers", "decoder_layers", "num_encoder_layers", "num_nextn_predict_layers",
           "block_count"),
    MAX_POSITIONS: ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len",
                    "max_sequence_length", "max_target_positions", "max_source_positions",
                    "original_max_position_embeddings", "context_length", "sliding_window"),
    2**24: ("vocab_size", "padded_vocab_size", "intermediate_size", "ffn_dim", "d_ff", "n_inner",
            "encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_length", "moe_intermediate_size",
            "shared_expert_intermediate_size"),
    2**20: ("hidden_size", "n_embd", "d_model", "embedding_length", "kv_lora_rank", "q_lora_rank",
            "state_size", "conv_kernel", "conv_L_cache"),
    2**16: ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads",
            "encoder_attention_heads", "decoder_attention_heads", "head_dim", "d_kv",
            "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
            "num_experts_per_tok", "attention.head_count", "attention.head_count_kv",
            "attention.key_length", "attention.value_length", "expert_count"),
}
_LIMITS = {key: limit for limit, keys in _KEYS.items() for key in keys}


def check_sizes(config: Mapping[str, Any], path: Path) -> None:
    """Reject a config or metadata with an excessive size.

    Args:
        config: values by key, also in nested mappings such as `text_config`.
        path: its file, for errors.

    Raises:
        LlmcError: names the key, its value and the limit.
    """
    for key, value in _numbers(config):
        limit = _LIMITS.get(key, value)
        if value > limit:
            raise LlmcError(f"'{path}' has {key} {value}, expected at most {limit}; correct it, or "
                            f"give another model")


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    pending = [config]
    while pending:
        for key, value in pending.pop().items():
            if isinstance(value, Mapping):
                pending.append(value)
            elif isinstance(value, int):
                yield key, value
