// RMSNorm, LayerNorm and both with a residual: one kernel.
#pragma once

#include "../../kernels/rowwise/params.h"
#include "plugin.h"

namespace llmc {

// Throws Error if rows exceed the kernel's maximum.
inline void check_norm_rows(int64_t hidden, const char* op) {
  if (hidden > kernels::kMaxNormHidden)
    throw Error(std::string(op) + " of rows of " + std::to_string(hidden) + " elements: at most " +
                std::to_string(kernels::kMaxNormHidden) + " are supported");
}

// Launches the kernel. Throws Error if rows exceed its maximum.
inline void norm(DType dtype, const kernels::NormParams& p, const char* op, cudaStream_t stream) {
  check_norm_rows(p.hidden, op);
  check(kernels::norm(dtype, p, stream), op);
}

template <bool kCentred, bool kResidual>
class Norm : public Plugin {
 public:
  explicit Norm(const Fields& fields) : epsilon_(real(fields, "epsilon")) {}

  static std::unique_ptr<Plugin> make(const Fields& fields) {
    return std::make_unique<Norm>(fields);
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims& x = in[0];
    if (x.empty()) throw Error("a norm's x has no dimensions");
    const Dim hidden = x[x.size() - 1];
    if (hidden.known()) check_norm_rows(hidden.number(), "a norm");
    if (kResidual) expect("a norm's residual", in[1], x);
    expect("a norm's weight", in[kWeight], {hidden});
    if (const Dims* bias = optional(in, kWeight + 1)) expect("a norm's bias", *bias, {hidden});
    return kResidual ? std::vector<Dims>{x, x} : std::vector<Dims>{x};
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    const Tensor* bias = optional(in, kWeight + 1);
    kernels::NormParams p{};
    p.y = out[0].data;
    p.sum = kResidual ? out[1].data : nullptr;
    p.x = in[0].data;
    p.residual = kResidual ? in[1].data : nullptr;
    p.weight = static_cast<const float*>(in[kWeight].data);
    p.bias = bias != nullptr ? static_cast<const float*>(bias->data) : nullptr;
    p.hidden = static_cast<int>(in[0].shape.back());
    p.rows = static_cast<int>(in[0].size() / p.hidden);
    p.epsilon = epsilon_;
    p.centred = kCentred;
    norm(in[0].dtype, p, "a norm", context.stream);
  }

  std::optional<FirstNorm> first_norm(size_t x, const std::vector<Tensor>& in,
                                      const std::vector<Tensor>& out, void*,
                                      const Context&) const override {
    if (kCentred || x >= kWeight || optional(in, kWeight + 1) != nullptr) return {};
    if (kResidual && in[0].data == in[1].data) return {};
    return FirstNorm{static_cast<const float*>(in[kWeight].data),
                     kResidual ? in[1 - x].data : nullptr, kResidual ? out[1].data : nullptr,
                     out[0].data, epsilon_};
  }

 private:
  static constexpr size_t kWeight = kResidual ? 2 : 1;
  float epsilon_;
};

}  // namespace llmc
