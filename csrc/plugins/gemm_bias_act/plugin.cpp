#include "../common/linear.h"

namespace llmc {
namespace {

class GemmBiasAct : public Plugin {
 public:
  explicit GemmBiasAct(const Fields& fields)
      : activation_(activation_of(fields)), quantized_(fields, 3) {}

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    return {linear_shape(in[0], quantized_.matrix(in, 1), false, optional(in, 2))};
  }

  int64_t workspace(const std::vector<Tensor>& in) const override {
    return linear_workspace(in[0], in[1], quantized_, false, optional(in, 2));
  }

  void prepare(const std::vector<Tensor>& in, std::set<const void*>& done,
               cudaStream_t stream) const override {
    quantized_.prepare(in, 1, done, stream);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    linear({in[0], in[1], quantized_.quant_params(in), quantized_.rows(in[1]), optional(in, 2),
            nullptr, out[0], activation_, false},
           quantized_, workspace, context);
  }

 private:
  Activation activation_;
  Quantized quantized_;
};

}  // namespace

void register_gemm_bias_act() {
  register_plugin({"GemmBiasAct",
                   1,
                   rounding_ports({"x: x_dtype", "weight: weight_dtype", "bias?"}),
                   {"y"},
                   taking_fields({{"activation", std::string("none")}}),
                   {},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<GemmBiasAct>(fields);
                   }});
}

}  // namespace llmc
