#include "../common/lora.h"

namespace llmc {
namespace {

class NormGemm : public Plugin {
 public:
  explicit NormGemm(const Fields& fields)
      : centred_(integer(fields, "centred") != 0),
        gated_(integer(fields, "gated") != 0),
        epsilon_(real(fields, "epsilon")),
        out_scale_inverse_(inverse_of(fields)),
        activation_(activation_of(fields)),
        quantized_(fields, 6),
        adapters_(10) {
    if (out_scale_inverse_ > 0 && !gated_)
      throw Error("NormGemm supports out_scale for a gated output only");
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims matrix = quantized_.matrix(in, 1),
               y = linear_shape(in[0], matrix, gated_, optional(in, 2));
    adapters_.expect_shapes(in, matrix);
    const Dims* sums = optional(in, 3);
    if (centred_ && sums == nullptr && optional(in, 4) == nullptr)
      throw Error("a centred NormGemm needs row_sums");
    if (sums != nullptr) expect("NormGemm's row_sums", *sums, {matrix[0]});
    for (size_t port : {4, 5})
      if (const Dims* own = optional(in, port))
        expect("NormGemm's norm_weight and norm_bias", *own, {in[0][1]});
    if (in[0][1].known()) check_norm_rows(in[0][1].number(), "NormGemm");
    return {rounded_shape(y, out_scale_inverse_)};
  }

  // The normalized x, then the workspace of the GEMM.
  int64_t workspace(const std::vector<Tensor>& in) const override {
    return adapters_.workspace(in, quantized_.rows(in[1]), gated_) + rows_workspace(in[0]) +
           linear_workspace(in[0], in[1], quantized_, gated_);
  }

  void prepare(const std::vector<Tensor>& in, std::set<const void*>& done,
               cudaStream_t stream) const override {
    quantized_.prepare(in, 1, done, stream);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    const kernels::QuantParams quant = quantized_.quant_params(in);
    const Linear whole = linear_of(in[0], quant, in, out);
    const InputTransform rows{true,
                              centred_,
                              quantized_.rounds(),
                              epsilon_,
                              floats(optional(in, 4)),
                              floats(optional(in, 5)),
                              quantized_.activation_scale(),
                              quantized_.activation_group()};
    const float* row_sums = centred_ ? floats(optional(in, 3)) : nullptr;
    adapters_.linear(whole, rows, in, workspace, context, [&](const Linear& plain, void* rest) {
      run(plain, rows, row_sums, rest, context);
    });
  }

  std::optional<FirstNorm> first_norm(size_t x, const std::vector<Tensor>& in,
                                      const std::vector<Tensor>&, void* workspace,
                                      const Context& context) const override {
    if (x != 0 || centred_ || quantized_.rounds() || optional(in, 5) != nullptr || context.adapters)
      return {};
    return FirstNorm{floats(optional(in, 4)), nullptr, nullptr, workspace, epsilon_};
  }

  void enqueue_normed(const std::vector<Tensor>& in, const std::vector<Tensor>& out,
                      void* workspace, const Context& context) const override {
    Tensor normed = in[0];
    normed.data = workspace;
    const kernels::QuantParams quant = quantized_.quant_params(in);
    linear(linear_of(normed, quant, in, out),
           static_cast<char*>(workspace) + rows_workspace(normed), context);
  }

 private:
  Linear linear_of(const Tensor& x, const kernels::QuantParams& quant,
                   const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    return {x,      in[1],       quant,  quantized_.rows(in[1]), optional(in, 2), nullptr,
            out[0], activation_, gated_, out_scale_inverse_};
  }

  void run(const Linear& whole, const InputTransform& rows, const float* row_sums, void* workspace,
           const Context& context) const {
    if (rows.rounded) return linear_of_rounded(whole, rows, workspace, context);
    const Tensor& x = whole.x;
    kernels::GemvParams p = gemv_params(whole);
    p.norm = true;
    p.row_sums = row_sums;
    p.epsilon = epsilon_;
    p.norm_weight = rows.weight;
    // Kernels for few rows fuse a norm with a weight (some GEMVs, and the wgmma GEMM) or without,
    // but none with a bias.
    const auto made = [&] { linear_of_made(whole, rows, workspace, context); };
    if (rows.weight == nullptr && rows.bias == nullptr)
      return choose_few(x.dtype, p, has_gemv(x, whole.quant), context,
                        [&] { norm_then_gemm(whole, rows, workspace, context); });
    if (centred_ || rows.bias != nullptr) return made();
    const bool norms = kernels::has_integer_gemv(p) || kernels::has_float16_gemv(p);
    choose_few(x.dtype, p, can_gemv(x) && norms, context, made);
  }

  static const float* floats(const Tensor* tensor) {
    return tensor == nullptr ? nullptr : static_cast<const float*>(tensor->data);
  }

  bool centred_, gated_;
  float epsilon_, out_scale_inverse_;
  Activation activation_;
  Quantized quantized_;
  Adapters adapters_;
};

}  // namespace

void register_norm_gemm() {
  register_plugin(
      {"NormGemm",
       2,
       lora_ports(rounding_ports({"x", "weight: weight_dtype", "bias?", "row_sums?: float32",
                                  "norm_weight?: float32", "norm_bias?: float32"}),
                  true),
       {"y: out_scale"},
       rounding_fields({{"centred", int64_t{0}},
                        {"epsilon", 1e-6},
                        {"activation", std::string("none")},
                        {"gated", int64_t{0}},
                        {"out_scale", 0.0}}),
       {},
       [](const Fields& fields) -> std::unique_ptr<Plugin> {
         return std::make_unique<NormGemm>(fields);
       }});
}

}  // namespace llmc
