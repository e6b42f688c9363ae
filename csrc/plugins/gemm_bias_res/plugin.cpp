#include "../common/linear_plugin.h"

namespace llmc {

void register_gemm_bias_res() {
  register_plugin(
      {"GemmBiasRes",
       1,
       lora_ports(rounding_ports({"x: x_dtype", "weight: weight_dtype", "bias?", "residual?"})),
       {"y"},
       taking_fields({}),
       {},
       [](const Fields& fields) -> std::unique_ptr<Plugin> {
         return std::make_unique<LinearPlugin>(fields, false, true);
       }});
}

}  // namespace llmc
