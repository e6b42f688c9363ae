#pragma once

#include "../attention_backend.h"

namespace llmc {

// Prefill attention by cuDNN. A plan is made, and timed against llmc's kernel, at the first use of
// a shape; lengths and batch are rounded up. always: use cuDNN even where llmc's kernel is faster,
// and throw Error if the library is missing. Otherwise nothing is served then.
std::unique_ptr<AttentionBackend> make_cudnn(bool always);

}  // namespace llmc
