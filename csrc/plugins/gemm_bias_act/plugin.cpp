#include "../common/linear_plugin.h"

namespace llmc {

void register_gemm_bias_act() {
  register_plugin({"GemmBiasAct",
                   1,
                   lora_ports(rounding_ports({"x: x_dtype", "weight: weight_dtype", "bias?"})),
                   {"y"},
                   taking_fields({{"activation", std::string("none")}}),
                   {},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<LinearPlugin>(fields, false, false);
                   }});
}

}  // namespace llmc
