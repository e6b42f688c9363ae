// The fastest backend: llmc's wgmma kernel on Hopper, otherwise cuDNN for shapes where it is
// faster.
#include "../../../kernels/attention/params.h"
#include "cudnn.h"

namespace llmc {
namespace {

class Fastest : public AttentionBackend {
 public:
  void make_plans(bool makes) override { cudnn_->make_plans(makes); }
  bool run(DType dtype, const kernels::AttentionParams& p, int longest, int reach,
           cudaStream_t stream) override {
    return !kernels::has_prefill_sm90(dtype, p) && cudnn_->run(dtype, p, longest, reach, stream);
  }

 private:
  const std::unique_ptr<AttentionBackend> cudnn_ = make_cudnn(/*always=*/false);
};

}  // namespace

std::unique_ptr<AttentionBackend> make_fastest() { return std::make_unique<Fastest>(); }

}  // namespace llmc
