#include "../common/attention.h"

namespace llmc {

void register_attention() {
  register_plugin(
      {"CausalAttention",
       7,
       {"qkv: columns", "key_cache: kv_dtype", "value_cache: kv_dtype", "cu_seqlens: int32",
        "past_lens: int32", "cos?: float32", "sin?: float32", "q_norm?: float32",
        "k_norm?: float32", "block_table?: int32", "distance_bias?: float32", "sinks?: float32",
        "v_norm?: float32", "key_bias?: float32", "query_scale?: float32",
        "rotary_positions?: int32", "rotary_axes?: int32", "bidirectional_ranges?: int32"},
       {"out: out_scale", "key_cache_out = key_cache", "value_cache_out = value_cache"},
       {{"num_heads", int64_t{0}},
        {"num_kv_heads", int64_t{0}},
        {"head_dim", int64_t{0}},
        {"scale", 0.0},
        {"softcap", 0.0},
        {"window", int64_t{0}},
        {"rotary_dim", int64_t{0}},
        {"interleaved", int64_t{0}},
        {"norm_epsilon", 1e-6},
        {"kv_dtype", std::string("")},
        {"norm_after_rotary", int64_t{0}},
        {"chunk", int64_t{0}},
        {"windowed_ranges", int64_t{1}},
        {"out_scale", 0.0}},
       {"num_heads", "num_kv_heads", "head_dim"},
       [](const Fields& fields) -> std::unique_ptr<Plugin> {
         AttentionPorts ports;
         ports.k_norm = 8, ports.block_table = 9, ports.distance_bias = 10, ports.sinks = 11;
         ports.v_norm = 12, ports.key_bias = 13, ports.query_scale = 14;
         ports.rotary_positions = 15, ports.rotary_axes = 16, ports.bidirectional_ranges = 17;
         return std::make_unique<CachedKeysAttention>("CausalAttention", /*reads=*/false, ports,
                                                      fields);
       }});
}

}  // namespace llmc
