#include "../../kernels/recurrent/params.h"
#include "../common/states.h"

namespace llmc {
namespace {

class CausalConv1d : public Plugin {
 public:
  explicit CausalConv1d(const Fields& fields)
      : kernel_size_(integer(fields, "kernel_size")), activation_(activation_of(fields)) {
    if (kernel_size_ < 2 || kernel_size_ > kernels::kMaxConvKernel)
      throw Error("CausalConv1d's kernel_size " + std::to_string(kernel_size_) +
                  ", expected 2 to " + std::to_string(kernels::kMaxConvKernel));
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims& hidden = in[0];
    if (hidden.size() != 2)
      throw Error("CausalConv1d's hidden has " + std::to_string(hidden.size()) +
                  " dimensions, expected 2");
    expect("CausalConv1d's weight", in[1], {hidden[1], kernel_size_});
    expect_states("CausalConv1d", in[2], optional(in, 6), optional(in, 7), in[4][0],
                  {kernel_size_ - 1, hidden[1]});
    if (const Dims* bias = optional(in, 5)) expect("CausalConv1d's bias", *bias, {hidden[1]});
    return {hidden, in[2]};
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    kernels::CausalConvParams p{};
    p.y = out[0].data;
    p.hidden = in[0].data;
    p.weight = in[1].data;
    p.state = static_cast<float*>(in[2].data);
    set_sequences(p, in[3], in[4], optional(in, 6), optional(in, 7), context);
    if (const Tensor* bias = optional(in, 5)) p.bias = bias->data;
    p.num_tokens = static_cast<int>(in[0].shape[0]);
    p.channels = static_cast<int>(in[0].shape[1]);
    p.pitch = in[0].row_pitch();
    p.batch = static_cast<int>(in[4].shape[0]);
    p.kernel_size = kernel_size_;
    p.activation = activation_;
    p.few = context.verifies || (context.num_decode == p.batch && p.num_tokens == p.batch);
    check(kernels::causal_conv(in[0].dtype, p, context.stream), "CausalConv1d");
  }

 private:
  int kernel_size_;
  Activation activation_;
};

}  // namespace

void register_causal_conv1d() {
  register_plugin({"CausalConv1d",
                   2,
                   {"hidden: columns", "weight", "state: float32", "cu_seqlens: int32",
                    "past_lens: int32", "bias?", "state_slots?: int32", "commit_lens?: int32"},
                   {"y", "state_out = state"},
                   {{"kernel_size", int64_t{0}}, {"activation", std::string("none")}},
                   {"kernel_size"},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<CausalConv1d>(fields);
                   }});
}

}  // namespace llmc
