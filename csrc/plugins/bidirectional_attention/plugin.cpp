#include "../../kernels/attention/bidirectional.h"
#include "../common/heads.h"

namespace llmc {
namespace {

class BidirectionalAttention : public Plugin {
 public:
  explicit BidirectionalAttention(const Fields& fields) {
    read_heads(p_, "BidirectionalAttention", fields, 256);
    p_.softcap = real(fields, "softcap");
    p_.window = integer(fields, "window");
    heads_.num_heads = p_.num_heads;
    heads_.num_kv_heads = p_.num_kv_heads;
    heads_.head_dim = p_.head_dim;
    heads_.rotary_dim = integer(fields, "rotary_dim");
    heads_.interleaved = integer(fields, "interleaved") != 0;
    heads_.norm_after_rotary = integer(fields, "norm_after_rotary") != 0;
    heads_.rotary_by_row = integer(fields, "rotary_by_row") != 0;
    heads_.norm_epsilon = real(fields, "norm_epsilon");
    if (p_.softcap < 0 || p_.window < 0)
      throw Error("BidirectionalAttention has softcap " + std::to_string(p_.softcap) +
                  " and window " + std::to_string(p_.window) + ", expected 0 or more");
    if (heads_.rotary_dim % 2 != 0 || heads_.rotary_dim < 0 || heads_.rotary_dim > p_.head_dim)
      throw Error("BidirectionalAttention's rotary_dim " + std::to_string(heads_.rotary_dim) +
                  " is not an even number from 0 to head_dim " + std::to_string(p_.head_dim));
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    if (in[0].size() != 2 || in[1].size() != 2 || in[2].size() != 2)
      throw Error("BidirectionalAttention's query, key and value have 2 dimensions, not " +
                  std::to_string(in[0].size()) + ", " + std::to_string(in[1].size()) + " and " +
                  std::to_string(in[2].size()));
    const std::string op = "BidirectionalAttention";
    const Dims *starts = optional(in, 4), *lens = optional(in, 5);
    if ((starts == nullptr) != (lens == nullptr))
      throw Error(op + " takes key_starts and key_lens together");
    if (optional(in, 11) != nullptr)
      throw Error(op + "'s key_steps have no kernel: its keys are in consecutive rows");
    const Dims out{in[0][0], static_cast<int64_t>(p_.num_heads) * p_.head_dim};
    const Dims keys{starts != nullptr ? in[1][0] : in[0][0],
                    static_cast<int64_t>(p_.num_kv_heads) * p_.head_dim};
    expect(op + "'s query", in[0], out);
    expect(op + "'s key", in[1], keys);
    expect(op + "'s value", in[2], in[1]);
    expect(op + "'s cu_seqlens", in[3], {in[3][0]});
    if (starts != nullptr) {
      expect(op + "'s key_lens", *lens, *starts);
      expect_starts(op, in[3], (*starts)[0]);
    }
    if (const Dims* bias = optional(in, 6)) {
      expect(op + "'s distance_bias", *bias, {p_.num_heads, (*bias)[1]});
      if ((*bias)[1].known() && (*bias)[1].number() % 2 == 0)
        throw Error(op + "'s distance_bias has " + std::to_string((*bias)[1].number()) +
                    " columns, expected an odd number: as many before a query as after it");
    }
    check_prepared(op, in, starts != nullptr);
    return {out};
  }

  int64_t workspace(const std::vector<Tensor>& in) const override {
    if (!prepares(in)) return 0;
    return (in[0].size() + in[1].size() + in[2].size()) * width(in[0].dtype);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    kernels::BidirectionalParams p = p_;
    p.query_stride = in[0].row_pitch();
    p.key_stride = in[1].row_pitch();
    p.value_stride = in[2].row_pitch();
    p.out = out[0].data;
    p.query = in[0].data;
    p.key = in[1].data;
    p.value = in[2].data;
    p.cu_seqlens = static_cast<const int32_t*>(in[3].data);
    p.num_tokens = static_cast<int>(in[0].shape[0]);
    p.batch = static_cast<int>(in[3].shape[0]) - 1;
    p.num_keys = static_cast<int>(in[1].shape[0]);
    const Tensor *starts = optional(in, 4), *lens = optional(in, 5);
    if (starts != nullptr) {
      p.key_starts = static_cast<const int32_t*>(starts->data);
      p.key_lens = static_cast<const int32_t*>(lens->data);
    }
    if (const Tensor* bias = optional(in, 6)) {
      p.distance_bias = static_cast<const float*>(bias->data);
      p.distances = static_cast<int>(bias->shape[1]);
    }
    if (prepares(in)) prepare_heads(p, in, workspace, context.stream);
    check(kernels::bidirectional(in[0].dtype, p, context.stream), "BidirectionalAttention");
  }

 private:
  // Checks cos, sin, q_norm and k_norm.
  void check_prepared(const std::string& op, const std::vector<Dims>& in, bool elsewhere) const {
    const Dims *cos = optional(in, 7), *sin = optional(in, 8);
    if ((cos == nullptr) != (sin == nullptr) || (cos == nullptr) != (heads_.rotary_dim == 0))
      throw Error(op + " takes cos, sin and rotary_dim together");
    if (cos != nullptr) {
      expect(op + "'s cos", *cos,
             {heads_.rotary_by_row ? in[0][0] : (*cos)[0], heads_.rotary_dim / 2});
      expect(op + "'s sin", *sin, *cos);
    }
    for (size_t norm : {9, 10})
      if (const Dims* weight = optional(in, norm))
        expect(op + "'s q_norm or k_norm", *weight, {p_.head_dim});
    const bool of_tokens = cos != nullptr || optional(in, 9) != nullptr ||
                           optional(in, 10) != nullptr || p_.window > 0;
    if (elsewhere && of_tokens)
      throw Error(op +
                  " takes a rotary embedding, norms and a window only with keys in the rows "
                  "of the queries");
  }

  // Whether heads are copied to scratch first: rotated, normalized, or to whole vectors.
  bool prepares(const std::vector<Tensor>& in) const {
    auto is_whole = [&](const Tensor& x) {
      return x.row_pitch() % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
    };
    // By its shape, which an input has before it has an address.
    auto is_given = [&](size_t index) { return index < in.size() && !in[index].shape.empty(); };
    return is_given(7) || is_given(9) || is_given(10) || !is_whole(in[0]) || !is_whole(in[1]) ||
           !is_whole(in[2]);
  }

  void prepare_heads(kernels::BidirectionalParams& p, const std::vector<Tensor>& in,
                     void* workspace, cudaStream_t stream) const {
    kernels::PrepareHeadsParams heads = heads_;
    auto floats = [&](size_t index) {
      const Tensor* given = optional(in, index);
      return given == nullptr ? nullptr : static_cast<const float*>(given->data);
    };
    heads.query = p.query, heads.key = p.key, heads.value = p.value;
    heads.query_stride = p.query_stride;
    heads.key_stride = p.key_stride;
    heads.value_stride = p.value_stride;
    heads.cu_seqlens = p.cu_seqlens;
    heads.cos = floats(7), heads.sin = floats(8);
    heads.q_norm = floats(9), heads.k_norm = floats(10);
    heads.num_tokens = p.num_tokens;
    heads.num_keys = p.num_keys;
    heads.batch = p.batch;
    char* room = static_cast<char*>(workspace);
    heads.query_out = room;
    heads.key_out = room += in[0].size() * width(in[0].dtype);
    heads.value_out = room + in[1].size() * width(in[0].dtype);
    check(kernels::prepare_heads(in[0].dtype, heads, stream), "BidirectionalAttention's heads");
    p.query = heads.query_out, p.key = heads.key_out, p.value = heads.value_out;
    p.query_stride = in[0].shape[1];
    p.key_stride = p.value_stride = in[1].shape[1];
  }

  kernels::BidirectionalParams p_{};
  kernels::PrepareHeadsParams heads_{};
};

}  // namespace

void register_bidirectional_attention() {
  register_plugin(
      {"BidirectionalAttention",
       2,
       {"query: columns", "key: columns", "value: columns", "cu_seqlens: int32",
        "key_starts?: int32", "key_lens?: int32", "distance_bias?: float32", "cos?: float32",
        "sin?: float32", "q_norm?: float32", "k_norm?: float32", "key_steps?: int32"},
       {"out"},
       {{"num_heads", int64_t{0}},
        {"num_kv_heads", int64_t{0}},
        {"head_dim", int64_t{0}},
        {"scale", 0.0},
        {"softcap", 0.0},
        {"window", int64_t{0}},
        {"rotary_dim", int64_t{0}},
        {"interleaved", int64_t{0}},
        {"norm_epsilon", 1e-6},
        {"norm_after_rotary", int64_t{0}},
        {"rotary_by_row", int64_t{0}}},
       {"num_heads", "num_kv_heads", "head_dim"},
       [](const Fields& fields) -> std::unique_ptr<Plugin> {
         return std::make_unique<BidirectionalAttention>(fields);
       }});
}

}  // namespace llmc
