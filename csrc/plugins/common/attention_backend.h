// Who computes attention over caches in which keys and values already are. A backend is one file of attention_backends/, by
// whose name it is asked for, with a function make_<name>() in it.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "../../kernels/common/dtype.h"

namespace llmc {

namespace kernels {
struct AttentionParams;
}

class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;
  // Why it serves no model of these numbers with such caches; empty where it does.
  virtual std::string refusal(DType, DType /*cache*/) const { return ""; }
  // Whether it is to be asked for sequences with one new token too. Else those are llmc's kernels'.
  virtual bool decodes() const { return false; }
  // From now on make plans, and time them, for shapes that there is none for; else those are not served.
  virtual void make_plans(bool) {}
  // Attention of p.queries, or where it decodes of p.qkv, as kernels::attention: returns false, with nothing of use done, where
  // it does not serve that; llmc's kernels do then. `longest`: new tokens of a sequence, at most; `reach`: tokens that a
  // sequence has with them, at most.
  virtual bool run(DType dtype, const kernels::AttentionParams& p, int longest, int reach, cudaStream_t stream) = 0;
};

std::vector<std::string> attention_backends();
// Throws Error where there is none of this name, or not what it needs.
std::unique_ptr<AttentionBackend> make_attention_backend(const std::string& name);

}  // namespace llmc
