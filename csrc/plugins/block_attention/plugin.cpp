#include "../../kernels/attention/block.h"
#include "../common/heads.h"

namespace llmc {
namespace {

class BlockAttention : public Plugin {
 public:
  explicit BlockAttention(const Fields& fields) {
    read_heads(p_, kOp, fields, 256);
    read_cached(p_, kOp, fields);
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const std::string op = kOp;
    const Dims *table = optional(in, kTable), &cache = in[1];
    const std::vector<Dim> positions =
        expect_cached(p_, op, in, "qkv", p_.num_heads + 2ll * p_.num_kv_heads, table);
    expect_positions(op, positions, cache, table);
    for (size_t norm : {7, 8})
      if (const Dims* weight = optional(in, norm))
        expect(op + "'s q_norm or k_norm", *weight, {p_.head_dim});
    return {{in[0][0], static_cast<int64_t>(p_.num_heads) * p_.head_dim}, cache, in[2]};
  }

  // Rotated queries.
  int64_t workspace(const std::vector<Tensor>& in) const override {
    return in[0].shape[0] * p_.num_heads * p_.head_dim * width(in[0].dtype);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    check_cache_dtypes(kOp, in, p_.float8);
    kernels::AttentionParams p = p_;
    p.out = out[0].data;
    p.qkv = in[0].data;
    p.qkv_stride = in[0].row_pitch();
    p.key_cache = in[1].data;
    p.value_cache = in[2].data;
    p.cu_seqlens = static_cast<const int32_t*>(in[3].data);
    p.past_lens = static_cast<const int32_t*>(in[4].data);
    auto floats = [&](size_t port) {
      const Tensor* table = optional(in, port);
      return table != nullptr ? static_cast<const float*>(table->data) : nullptr;
    };
    p.cos = floats(5), p.sin = floats(6), p.q_norm = floats(7), p.k_norm = floats(8);
    p.num_tokens = static_cast<int>(in[0].shape[0]);
    p.batch = static_cast<int>(in[4].shape[0]);
    p.max_seq_len = static_cast<int>(in[1].shape[2]);
    if (const Tensor* table = optional(in, kTable)) {
      if (context.building) return;  // blocks do not exist while TensorRT builds
      p.block_table = static_cast<const int32_t*>(table->data);
      p.block_size = p.max_seq_len;
      p.num_blocks = static_cast<int>(in[1].shape[0]);
      p.max_seq_len *= static_cast<int>(table->shape[1]);
      if ((p.block_size & (p.block_size - 1)) != 0)
        throw Error(std::string(kOp) + "'s block size " + std::to_string(p.block_size) +
                    " is not a power of two");
    }
    p.queries = workspace;
    p.decode = p.num_tokens == p.batch;  // a row must not clear what the next one of its sequence
                                         // writes
    check(kernels::append(in[0].dtype, p, context.stream), kOp);
    if (context.keys_only) {  // later layers multiply rows of the context by 0
      check(cudaMemsetAsync(p.out, 0, out[0].size() * width(out[0].dtype), context.stream), kOp);
      return;
    }
    check(kernels::block_attention(in[0].dtype, p, context.stream), kOp);
  }

 private:
  static constexpr const char* kOp = "BlockAttention";
  static constexpr size_t kTable = 9;
  kernels::AttentionParams p_{};
};

}  // namespace

void register_block_attention() {
  register_plugin({"BlockAttention",
                   2,
                   {"qkv: columns", "key_cache: kv_dtype", "value_cache: kv_dtype",
                    "cu_seqlens: int32", "past_lens: int32", "cos?: float32", "sin?: float32",
                    "q_norm?: float32", "k_norm?: float32", "block_table?: int32"},
                   {"out", "key_cache_out = key_cache", "value_cache_out = value_cache"},
                   {{"num_heads", int64_t{0}},
                    {"num_kv_heads", int64_t{0}},
                    {"head_dim", int64_t{0}},
                    {"scale", 0.0},
                    {"window", int64_t{0}},
                    {"rotary_dim", int64_t{0}},
                    {"interleaved", int64_t{0}},
                    {"norm_epsilon", 1e-6},
                    {"kv_dtype", std::string("")},
                    {"norm_after_rotary", int64_t{0}}},
                   {"num_heads", "num_kv_heads", "head_dim"},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<BlockAttention>(fields);
                   }});
}

}  // namespace llmc
