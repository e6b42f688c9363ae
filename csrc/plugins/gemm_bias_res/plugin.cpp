#include "../common/linear.h"

namespace llmc {
namespace {

class GemmBiasRes : public Plugin {
 public:
  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    return {linear_shape(in[0], in[1], false, optional(in, 2), optional(in, 3))};
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    linear({in[0], in[1], optional(in, 2), optional(in, 3), out[0], Activation::kNone, false}, nullptr,
           context);
  }
};

}  // namespace

void register_gemm_bias_res() {
  register_plugin({"GemmBiasRes", 1, {"x", "weight", "bias?", "residual?"}, {"y"}, {}, {},
                   [](const Fields&) -> std::unique_ptr<Plugin> {
                     return std::make_unique<GemmBiasRes>();
                   }});
}

}  // namespace llmc
