// An attention backend that serves prefill of one sequence by the reference kernel, and leaves the rest
// to llmc's kernels.
#include "kernels/attention/params.h"
#include "plugins/common/plugin.h"

namespace llmc {
namespace {

class Example : public AttentionBackend {
 public:
  std::string refusal(DType dtype, DType cache) const override {
    return cache == dtype ? "" : "serves a KV cache of the model's dtype";
  }

  bool run(DType dtype, const kernels::AttentionParams& p, int longest, int reach,
           cudaStream_t stream) override {
    if (p.batch != 1) return false;
    kernels::AttentionParams reference = p;
    reference.vanilla = true;
    check(kernels::attention(dtype, reference, stream), "attention");
    return true;
  }
};

}  // namespace

std::unique_ptr<AttentionBackend> make_example() { return std::make_unique<Example>(); }

}  // namespace llmc
