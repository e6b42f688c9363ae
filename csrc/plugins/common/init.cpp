#include <mutex>

#include "plugin.h"

// llmc_ops.inc has X(op) for every folder with a plugin.cpp; the build writes it.
#define X(op) void register_##op();
namespace llmc {
#include "llmc_ops.inc"
}
#undef X

namespace llmc {

void init_plugins() {
  static std::once_flag once;
  std::call_once(once, [] {
#define X(op) register_##op();
#include "llmc_ops.inc"
#undef X
  });
}

}  // namespace llmc
