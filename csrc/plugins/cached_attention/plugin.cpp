#include "../common/attention.h"

namespace llmc {

void register_cached_attention() {
  register_plugin({"CachedAttention",
                   3,
                   {"query", "key_cache: kv_dtype", "value_cache: kv_dtype", "cu_seqlens: int32",
                    "past_lens: int32", "cos?: float32", "sin?: float32", "q_norm?: float32",
                    "query_scale?: float32", "block_table?: int32"},
                   {"out: out_scale"},
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
                    {"out_scale", 0.0}},
                   {"num_heads", "num_kv_heads", "head_dim"},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     AttentionPorts ports;
                     ports.query_scale = 8, ports.block_table = 9;
                     return std::make_unique<CachedKeysAttention>("CachedAttention", /*reads=*/true,
                                                                  ports, fields);
                   }});
}

}  // namespace llmc
