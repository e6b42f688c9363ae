// Prefill attention by cuDNN, where it is.
#pragma once

#include "../../kernels/launch.h"

namespace llmc {

// cuDNN's attention on one device; a plan is made at the first use of a shape, whose lengths and batch are
// rounded up.
class Sdpa {
 public:
  Sdpa();  // the library is looked for; without it nothing is served
  ~Sdpa();
  Sdpa(const Sdpa&) = delete;
  Sdpa& operator=(const Sdpa&) = delete;

  // Attention of p.queries over the caches, both already written, as kernels::attention: returns false, with
  // nothing done, where cuDNN does not serve it. `longest`: new tokens of a sequence, at most; `reach`: tokens
  // that a sequence has with them, at most.
  bool run(DType dtype, const kernels::AttentionParams& p, int longest, int reach, cudaStream_t stream);

 private:
  struct State;
  State* state_;
};

}  // namespace llmc
