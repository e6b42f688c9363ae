// Prefill attention by cuDNN, where it is.
#pragma once

#include "../../kernels/launch.h"

namespace llmc {

// Who computes attention: whichever is the fastest, this one where it can, or the kernel that serves everything.
enum class AttentionBackend : int32_t { kFastest, kVanilla, kLlmc, kCudnn };

// cuDNN's attention on one device; a plan is made, and timed beside our kernel, at the first use of a shape,
// whose lengths and batch are rounded up.
class Sdpa {
 public:
  // The library is looked for; without it nothing is served. always: even where our kernel is faster.
  explicit Sdpa(bool always = false);
  ~Sdpa();
  // From now on make plans, and time them, for shapes that there is none for; else those are not served.
  void make_plans(bool makes) { makes_ = makes; }
  Sdpa(const Sdpa&) = delete;
  Sdpa& operator=(const Sdpa&) = delete;

  // Whether the library is there.
  bool found() const;

  // Attention of p.queries over the caches, both already written, as kernels::attention: returns false, with
  // nothing of use done, where cuDNN does not serve it, or for this shape was slower than that. `longest`: new
  // tokens of a sequence, at most; `reach`: tokens that a sequence has with them, at most.
  bool run(DType dtype, const kernels::AttentionParams& p, int longest, int reach, cudaStream_t stream);

 private:
  struct State;
  State* state_;
  const bool always_;
  bool makes_ = true;
};

}  // namespace llmc
