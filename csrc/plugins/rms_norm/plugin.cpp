#include "../common/norm.h"

namespace llmc {

void register_rms_norm() {
  register_plugin({"RMSNorm",
                   1,
                   {"x", "weight: float32"},
                   {"y"},
                   {{"epsilon", 1e-6}},
                   {},
                   Norm<false, false>::make});
}

}  // namespace llmc
