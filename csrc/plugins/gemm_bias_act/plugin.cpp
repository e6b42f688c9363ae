#include "../common/lora.h"

namespace llmc {
namespace {

class GemmBiasAct : public Plugin {
 public:
  explicit GemmBiasAct(const Fields& fields)
      : activation_(activation_of(fields)), quantized_(fields, 3), adapters_(7) {}

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims matrix = quantized_.matrix(in, 1);
    adapters_.expect_shapes(in, matrix);
    return {linear_shape(in[0], matrix, false, optional(in, 2))};
  }

  int64_t workspace(const std::vector<Tensor>& in) const override {
    return adapters_.workspace(in, quantized_.rows(in[1]), false) +
           linear_workspace(in[0], in[1], quantized_, false, optional(in, 2));
  }

  void prepare(const std::vector<Tensor>& in, std::set<const void*>& done,
               cudaStream_t stream) const override {
    quantized_.prepare(in, 1, done, stream);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    const Linear whole{in[0],
                       in[1],
                       quantized_.quant_params(in),
                       quantized_.rows(in[1]),
                       optional(in, 2),
                       nullptr,
                       out[0],
                       activation_,
                       false};
    adapters_.linear(whole, {}, in, workspace, context, [&](const Linear& plain, void* rest) {
      linear(plain, quantized_, rest, context);
    });
  }

 private:
  Activation activation_;
  Quantized quantized_;
  Adapters adapters_;
};

}  // namespace

void register_gemm_bias_act() {
  register_plugin({"GemmBiasAct",
                   1,
                   lora_ports(rounding_ports({"x: x_dtype", "weight: weight_dtype", "bias?"})),
                   {"y"},
                   taking_fields({{"activation", std::string("none")}}),
                   {},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<GemmBiasAct>(fields);
                   }});
}

}  // namespace llmc
