#include "../common/linear.h"

namespace llmc {
namespace {

// The contract alone: there is no kernel yet, and no target but cpu is given the op.
class BidirectionalAttention : public Plugin {
 public:
  explicit BidirectionalAttention(const Fields& fields)
      : num_heads_(integer(fields, "num_heads")), head_dim_(integer(fields, "head_dim")) {
    const int num_kv_heads = integer(fields, "num_kv_heads");
    if (num_kv_heads < 1 || num_heads_ % num_kv_heads != 0)
      throw Error("BidirectionalAttention's num_heads " + std::to_string(num_heads_) +
                  " is not a multiple of num_kv_heads " + std::to_string(num_kv_heads));
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    if (in[0].size() != 2 || in[1].size() != 2 || in[2].size() != 2)
      throw Error("BidirectionalAttention's query, key and value have 2 dimensions, not " +
                  std::to_string(in[0].size()) + ", " + std::to_string(in[1].size()) + " and " +
                  std::to_string(in[2].size()));
    return {{in[0][0], static_cast<int64_t>(num_heads_) * head_dim_}};
  }

  void enqueue(const std::vector<Tensor>&, const std::vector<Tensor>&, void*,
               const Context&) const override {
    throw Error("BidirectionalAttention has no kernel yet; compile with --target cpu");
  }

 private:
  int num_heads_, head_dim_;
};

}  // namespace

void register_bidirectional_attention() {
  register_plugin({"BidirectionalAttention", 1,
                   {"query", "key", "value", "cu_seqlens: int32", "key_starts?: int32",
                    "key_lens?: int32", "distance_bias?: float32"},
                   {"out"},
                   {{"num_heads", int64_t{0}}, {"num_kv_heads", int64_t{0}}, {"head_dim", int64_t{0}},
                    {"scale", 0.0}},
                   {"num_heads", "num_kv_heads", "head_dim"},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<BidirectionalAttention>(fields);
                   }});
}

}  // namespace llmc
