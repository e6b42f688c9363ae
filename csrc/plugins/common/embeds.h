// Ops that read rows `embeds` for some tokens of x.
#pragma once

#include "../../kernels/rowwise/params.h"
#include "plugin.h"

namespace llmc {

class EmbedsOp : public Plugin {
 public:
  using Launcher = cudaError_t (*)(DType, const kernels::InputEmbedsParams&, cudaStream_t);

  EmbedsOp(const char* op, Launcher launch) : op_(op), launch_(launch) {}

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const std::string op = op_;
    expect(op + "'s x", in[0], {in[0][0], in[0][1]});
    expect(op + "'s embeds", in[1], {in[1][0], in[0][1]});
    expect(op + "'s embed_ids", in[2], {in[0][0]});
    return {in[0]};
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    kernels::InputEmbedsParams p{};
    p.y = out[0].data;
    p.x = in[0].data;
    p.embeds = in[1].data;
    p.ids = static_cast<const int32_t*>(in[2].data);
    p.num_tokens = static_cast<int>(in[0].shape[0]);
    p.hidden = static_cast<int>(in[0].shape[1]);
    check(launch_(out[0].dtype, p, context.stream), op_);
  }

 private:
  const char* const op_;
  const Launcher launch_;
};

}  // namespace llmc
