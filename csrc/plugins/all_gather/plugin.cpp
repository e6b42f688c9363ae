#include "../../kernels/rowwise/params.h"
#include "../common/collective.h"

namespace llmc {
namespace {

class AllGather : public Plugin {
 public:
  explicit AllGather(const Fields& fields) : tp_size_(integer(fields, "tp_size")) {
    if (tp_size_ < 1)
      throw Error("AllGather's tp_size " + std::to_string(tp_size_) + " is below 1");
  }

  bool collective() const override { return true; }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    expect("AllGather's x", in[0], {in[0][0], in[0][1]});
    return {{in[0][0], in[0][1] * tp_size_}};
  }

  // The gathered parts, before they are interleaved.
  int64_t workspace(const std::vector<Tensor>& in) const override {
    return in[0].size() * tp_size_ * (in[0].dtype == DType::kFloat32 ? 4 : 2);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    const int rows = static_cast<int>(in[0].shape[0]), width = static_cast<int>(in[0].shape[1]);
    const ncclComm_t communicator = communicator_of(context, tp_size_);
    if (context.peers != nullptr && context.peers->all_gather(in[0].dtype, out[0].data, in[0].data,
                                                              rows, width, context.stream))
      return;
    void* gathered = rows > 1 ? workspace : out[0].data;
    check(ncclAllGather(in[0].data, gathered, in[0].size(), nccl_type(in[0].dtype), communicator,
                        context.stream),
          "AllGather");
    if (rows > 1)
      check(kernels::interleave(in[0].dtype, out[0].data, workspace, tp_size_, rows, width,
                                context.stream),
            "AllGather");
  }

 private:
  int tp_size_;
};

}  // namespace

void register_all_gather() {
  register_plugin({"AllGather",
                   1,
                   {"x"},
                   {"y"},
                   {{"tp_size", int64_t{1}}},
                   {"tp_size"},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<AllGather>(fields);
                   }});
}

}  // namespace llmc
