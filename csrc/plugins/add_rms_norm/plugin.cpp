#include "../common/norm.h"

namespace llmc {

void register_add_rms_norm() {
  register_plugin({"AddRMSNorm",
                   1,
                   {"x", "residual", "weight: float32"},
                   {"y", "sum"},
                   {{"epsilon", 1e-6}},
                   {},
                   Norm<false, true>::make});
}

}  // namespace llmc
