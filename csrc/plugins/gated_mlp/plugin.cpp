#include "../common/linear.h"

namespace llmc {
namespace {

class GatedMLP : public Plugin {
 public:
  explicit GatedMLP(const Fields& fields) : activation_(activation_of(fields)) {}

  std::vector<Shape> shapes(const std::vector<Shape>& in) const override {
    return {{in[0][0], in[1][0] / 2}};
  }

  // Gates and ups side by side, where they are not multiplied at once.
  int64_t workspace(const std::vector<Tensor>& in) const override {
    return is_gemv(in[0].dtype, in[0].shape[0], in[1].shape[1])
        ? 0 : in[0].shape[0] * in[1].shape[0] * (in[0].dtype == DType::kFloat32 ? 4 : 2);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    const Tensor& x = in[0];
    const Tensor* bias = optional(in, 2);
    const int inner = static_cast<int>(in[1].shape[1]), width = static_cast<int>(in[1].shape[0] / 2);
    const int rows = static_cast<int>(x.size() / inner);
    const void* bias_data = bias != nullptr ? bias->data : nullptr;
    if (is_gemv(x.dtype, rows, inner)) {
      kernels::GemvParams p{out[0].data, x.data, in[1].data, bias_data, nullptr, rows, inner, width,
                            activation_, true};
      check(kernels::gemv(x.dtype, p, context.stream), "GatedMLP");
    } else {
      context.gemm->run(x.dtype, workspace, x.data, in[1].data, bias_data, nullptr, rows, inner,
                        2 * width, Activation::kNone, context.stream);
      check(kernels::gate(x.dtype, out[0].data, workspace, rows, width, activation_, context.stream),
            "GatedMLP");
    }
  }

 private:
  Activation activation_;
};

}  // namespace

void register_gated_mlp() {
  register_plugin({"GatedMLP", 1, {"x", "weight", "bias?"}, {"y"},
                   {{"activation", std::string("silu")}}, {},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<GatedMLP>(fields);
                   }});
}

}  // namespace llmc
