#include "../common/norm.h"

namespace llmc {

void register_layer_norm() {
  register_plugin({"LayerNorm",
                   1,
                   {"x", "weight: float32", "bias?: float32"},
                   {"y"},
                   {{"epsilon", 1e-5}},
                   {},
                   Norm<true, false>::make});
}

}  // namespace llmc
