#include "../common/norm.h"

namespace llmc {

void register_add_layer_norm() {
  register_plugin({"AddLayerNorm",
                   1,
                   {"x", "residual", "weight: float32", "bias?: float32"},
                   {"y", "sum"},
                   {{"epsilon", 1e-5}},
                   {},
                   Norm<true, true>::make});
}

}  // namespace llmc
