#pragma once

#include "../attention_backend.h"

namespace llmc {

// Prefill attention by cuDNN; a plan is made, and timed beside our kernel, at the first use of a shape, whose lengths and batch
// are rounded up. always: even where our kernel is faster; throws Error where the library is not there then, else serves nothing.
std::unique_ptr<AttentionBackend> make_cudnn(bool always);

}  // namespace llmc
