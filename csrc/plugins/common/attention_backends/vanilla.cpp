// The per-token kernel, which supports everything, as a reference.
#include "../../../kernels/attention/params.h"
#include "../plugin.h"

namespace llmc {
namespace {

class Vanilla : public AttentionBackend {
 public:
  bool decodes() const override { return true; }
  bool run(DType dtype, const kernels::AttentionParams& p, int, int, cudaStream_t stream) override {
    kernels::AttentionParams own = p;
    own.vanilla = true;
    check(kernels::attention(dtype, own, stream), "attention");
    return true;
  }
};

}  // namespace

std::unique_ptr<AttentionBackend> make_vanilla() { return std::make_unique<Vanilla>(); }

}  // namespace llmc
