#include "../../kernels/attention/block.h"
#include "../common/heads.h"

namespace llmc {
namespace {

class BlockAttention : public Plugin {
 public:
  explicit BlockAttention(const Fields& fields) {
    read_heads(p_, kOp, fields, 256);
    p_.rotary_dim = integer(fields, "rotary_dim");
    p_.window = integer(fields, "window");
    p_.interleaved = integer(fields, "interleaved") != 0;
    p_.norm_epsilon = real(fields, "norm_epsilon");
    p_.norm_after_rotary = integer(fields, "norm_after_rotary") != 0;
    if (p_.rotary_dim < 0 || p_.rotary_dim % 2 != 0 || p_.rotary_dim > p_.head_dim)
      throw Error(std::string(kOp) + "'s rotary_dim " + std::to_string(p_.rotary_dim) +
                  " is not an even number from 0 to head_dim " + std::to_string(p_.head_dim));
    const auto& kv_dtype = std::get<std::string>(fields.at("kv_dtype"));
    p_.float8 = kv_dtype == name_of(DType::kFloat8);
    if (!p_.float8 && !kv_dtype.empty())
      throw Error(std::string(kOp) + "'s kv_dtype can be '' or " + name_of(DType::kFloat8) +
                  ", not '" + kv_dtype + "'");
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const std::string op = kOp;
    if (in[0].size() != 2 || in[1].size() != 4 || in[2].size() != 4)
      throw Error(op + "'s rows need 2 dimensions and each cache 4, not " +
                  std::to_string(in[0].size()) + ", " + std::to_string(in[1].size()) + " and " +
                  std::to_string(in[2].size()));
    const Dims &qkv = in[0], &cache = in[1], *table = optional(in, kTable);
    const Dim batch = in[4][0];
    expect(op + "'s qkv", qkv,
           {qkv[0], (p_.num_heads + 2ll * p_.num_kv_heads) * int64_t{p_.head_dim}});
    expect(op + "'s key_cache", cache,
           {table != nullptr ? cache[0] : batch, p_.num_kv_heads, cache[2], p_.head_dim});
    expect(op + "'s value_cache", in[2], cache);
    expect(op + "'s past_lens", in[4], {batch});
    expect_starts(op, in[3], batch);
    const Dims *cos = optional(in, 5), *sin = optional(in, 6);
    if ((cos == nullptr) != (p_.rotary_dim == 0) || (sin == nullptr) != (cos == nullptr))
      throw Error(op + " takes cos, sin and a rotary_dim above 0 together");
    for (const Dims* turns : {cos, sin}) {
      if (turns == nullptr) continue;
      expect(op + "'s cos or sin", *turns, {(*turns)[0], p_.rotary_dim / 2});
      if (table == nullptr) expect_at_least(op + "'s positions of a table", (*turns)[0], cache[2]);
      else expect(op + "'s positions of a table", Dims{(*turns)[0]}, {(*cos)[0]});
    }
    for (size_t norm : {7, 8})
      if (const Dims* weight = optional(in, norm))
        expect(op + "'s q_norm or k_norm", *weight, {p_.head_dim});
    if (table != nullptr) expect(op + "'s block_table", *table, {batch, (*table)[1]});
    return {{qkv[0], static_cast<int64_t>(p_.num_heads) * p_.head_dim}, cache, in[2]};
  }

  // Rotated queries.
  int64_t workspace(const std::vector<Tensor>& in) const override {
    return in[0].shape[0] * p_.num_heads * p_.head_dim * width(in[0].dtype);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    if ((in[1].dtype == DType::kFloat8) != p_.float8 || in[2].dtype != in[1].dtype)
      throw Error(std::string(kOp) + "'s caches are " + name_of(in[1].dtype) + " and " +
                  name_of(in[2].dtype) + ", which does not match its kv_dtype");
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
