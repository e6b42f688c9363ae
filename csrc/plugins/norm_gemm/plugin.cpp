#include "../common/linear.h"
#include "../common/norm.h"

namespace llmc {
namespace {

class NormGemm : public Plugin {
 public:
  explicit NormGemm(const Fields& fields)
      : centred_(integer(fields, "centred") != 0), gated_(integer(fields, "gated") != 0),
        epsilon_(real(fields, "epsilon")), activation_(activation_of(fields)), quantized_(fields, 4) {}

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims matrix = quantized_.matrix(in, 1), y = linear_shape(in[0], matrix, gated_, optional(in, 2));
    const Dims* sums = optional(in, 3);
    if (centred_ && sums == nullptr) throw Error("a centred NormGemm needs row_sums");
    if (sums != nullptr) expect("NormGemm's row_sums", *sums, {matrix[0]});
    if (in[0][1].known()) check_norm_rows(in[0][1].number(), "NormGemm");
    return {y};
  }

  // The normed x, then what the GEMM needs.
  int64_t workspace(const std::vector<Tensor>& in) const override {
    return normed_bytes(in[0]) + linear_workspace(in[0], in[1], quantized_, gated_);
  }

  void prepare(const std::vector<Tensor>& in, std::set<const void*>& done, cudaStream_t stream) const override {
    quantized_.prepare(in, 1, done, stream);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    const Tensor& x = in[0];
    const kernels::Packing packing = quantized_.packing(in);
    const Linear whole{x, in[1], packing, quantized_.rows(in[1]), optional(in, 2), nullptr, out[0], activation_, gated_};
    if (!has_few_rows(x, packing)) return norm_then_gemm(whole, workspace, context);
    kernels::GemvParams p = gemv_params(whole);
    p.norm = true;
    p.row_sums = centred_ ? static_cast<const float*>(optional(in, 3)->data) : nullptr;
    p.epsilon = epsilon_;
    choose_gemv(x.dtype, p, context, [&] { norm_then_gemm(whole, workspace, context); });
  }

 private:
  void norm_then_gemm(const Linear& l, void* workspace, const Context& context) const {
    const Tensor& x = l.x;
    Tensor normed = x;
    normed.data = workspace;
    kernels::NormParams p{};
    p.y = normed.data;
    p.x = x.data;
    p.rows = static_cast<int>(x.shape[0]);
    p.hidden = static_cast<int>(x.shape[1]);
    p.epsilon = epsilon_;
    p.centred = centred_;
    norm(x.dtype, p, "NormGemm", context.stream);
    gemm_of_many({normed, l.weight, l.packing, l.out, l.bias, nullptr, l.y, l.activation, l.gated},
         static_cast<char*>(workspace) + normed_bytes(x), context);
  }

  static int64_t normed_bytes(const Tensor& x) {
    return (x.size() * (x.dtype == DType::kFloat32 ? 4 : 2) + 255) / 256 * 256;
  }

  bool centred_, gated_;
  float epsilon_;
  Activation activation_;
  Quantized quantized_;
};

}  // namespace

void register_norm_gemm() {
  register_plugin({"NormGemm", 1, quantizable_ports({"x", "weight: weight_dtype", "bias?", "row_sums?: float32"}), {"y"},
                   quantizable_fields({{"centred", int64_t{0}}, {"epsilon", 1e-6}, {"activation", std::string("none")},
                                   {"gated", int64_t{0}}}), {},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<NormGemm>(fields);
                   }});
}

}  // namespace llmc
