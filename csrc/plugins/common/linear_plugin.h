// A linear layer with adapters: GatedMLP, GemmBiasAct and GemmBiasRes.
#pragma once

#include "lora.h"

namespace llmc {

class LinearPlugin : public Plugin {
 public:
  // Inputs: x, weight, bias and, with `adds`, a residual; then those of the quantization and of the
  // adapters. A layer that adds a residual has no activation.
  LinearPlugin(const Fields& fields, bool gated, bool adds)
      : gated_(gated),
        adds_(adds),
        activation_(adds ? Activation::kNone : activation_of(fields)),
        out_scale_inverse_(gated ? inverse_of(fields) : 0),
        quantized_(fields, adds ? 4 : 3),
        adapters_(adds ? 8 : 7) {}

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims matrix = quantized_.matrix(in, 1);
    adapters_.expect_shapes(in, matrix);
    return {rounded_shape(linear_shape(in[0], matrix, gated_, optional(in, 2), residual(in)),
                          out_scale_inverse_)};
  }

  int64_t workspace(const std::vector<Tensor>& in) const override {
    const Tensor* added = residual(in) != nullptr ? residual(in) : optional(in, 2);
    return adapters_.workspace(in, quantized_.rows(in[1]), gated_) +
           linear_workspace(in[0], in[1], quantized_, gated_, added);
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
                       residual(in),
                       out[0],
                       activation_,
                       gated_,
                       out_scale_inverse_};
    adapters_.linear(whole, {}, in, workspace, context, [&](const Linear& plain, void* rest) {
      linear(plain, quantized_, rest, context);
    });
  }

 private:
  template <typename Input>
  const Input* residual(const std::vector<Input>& in) const {
    return adds_ ? optional(in, 3) : nullptr;
  }

  bool gated_, adds_;
  Activation activation_;
  float out_scale_inverse_;
  Quantized quantized_;
  Adapters adapters_;
};

}  // namespace llmc
