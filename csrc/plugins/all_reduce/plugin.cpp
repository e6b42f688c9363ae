#include "../common/collective.h"

namespace llmc {
namespace {

class AllReduce : public Plugin {
 public:
  explicit AllReduce(const Fields& fields) : tp_size_(integer(fields, "tp_size")) {}

  bool collective() const override { return true; }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override { return {in[0]}; }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    const ncclComm_t communicator = communicator_of(context, tp_size_);
    if (context.peers != nullptr && context.peers->all_reduce(in[0].dtype, out[0].data, in[0].data,
                                                              in[0].size(), context.stream))
      return;
    check(ncclAllReduce(in[0].data, out[0].data, in[0].size(), nccl_type(in[0].dtype), ncclSum,
                        communicator, context.stream),
          "AllReduce");
  }

 private:
  int tp_size_;
};

}  // namespace

void register_all_reduce() {
  register_plugin({"AllReduce",
                   1,
                   {"x"},
                   {"y"},
                   {{"tp_size", int64_t{1}}},
                   {"tp_size"},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<AllReduce>(fields);
                   }});
}

}  // namespace llmc
