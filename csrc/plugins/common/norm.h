// The four norm ops are one kernel: with or without mean and bias, with or without a residual.
#pragma once

#include "plugin.h"

namespace llmc {

// Enqueue the kernel; throws Error where rows are longer than it takes.
inline void norm(DType dtype, const kernels::NormParams& p, const char* op, cudaStream_t stream) {
  if (p.hidden > kernels::kNormHidden)
    throw Error(std::string(op) + " of rows of " + std::to_string(p.hidden) + " elements: at most " +
                std::to_string(kernels::kNormHidden) + " are served");
  check(kernels::norm(dtype, p, stream), op);
}

template <bool kCentred, bool kResidual>
class Norm : public Plugin {
 public:
  explicit Norm(const Fields& fields) : epsilon_(real(fields, "epsilon")) {}

  static std::unique_ptr<Plugin> make(const Fields& fields) { return std::make_unique<Norm>(fields); }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    return kResidual ? std::vector<Dims>{in[0], in[0]} : std::vector<Dims>{in[0]};
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    constexpr int kWeight = kResidual ? 2 : 1;
    const bool biased = in.size() > kWeight + 1 && in[kWeight + 1].data != nullptr;
    kernels::NormParams p{};
    p.y = out[0].data;
    p.sum = kResidual ? out[1].data : nullptr;
    p.x = in[0].data;
    p.residual = kResidual ? in[1].data : nullptr;
    p.weight = static_cast<const float*>(in[kWeight].data);
    p.bias = biased ? static_cast<const float*>(in[kWeight + 1].data) : nullptr;
    p.hidden = static_cast<int>(in[0].shape.back());
    p.rows = static_cast<int>(in[0].size() / p.hidden);
    p.epsilon = epsilon_;
    p.centred = kCentred;
    norm(in[0].dtype, p, "a norm", context.stream);
  }

 private:
  float epsilon_;
};

}  // namespace llmc
