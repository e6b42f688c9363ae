// Backends for attention to a KV cache that already has the new keys and values. A backend is one
// file of attention_backends/, selected by its name, with a function make_<name>().
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
  // The reason why models of this dtype and cache dtype are not supported; empty if they are.
  virtual std::string refusal(DType, DType /*cache*/) const { return ""; }
  // Whether run() is also called for decoding sequences. Otherwise llmc's kernels handle them.
  virtual bool decodes() const { return false; }
  // Whether to make and time plans for unknown shapes from now on. Otherwise run() returns false
  // for these.
  virtual void make_plans(bool) {}
  // Attention of p.queries (with decodes() of p.qkv), as kernels::attention(). Returns false if
  // unsupported; llmc's kernels are used then. `longest`: maximum number of new tokens of a
  // sequence; `reach`: maximum number of all its tokens.
  virtual bool run(DType dtype, const kernels::AttentionParams& p, int longest, int reach,
                   cudaStream_t stream) = 0;
};

std::vector<std::string> attention_backends();
// Throws Error if there is no backend of this name, or a library is missing.
std::unique_ptr<AttentionBackend> make_attention_backend(const std::string& name);

}  // namespace llmc
