#include "../common/linear_plugin.h"

namespace llmc {

void register_gated_mlp() {
  register_plugin({"GatedMLP",
                   1,
                   lora_ports(rounding_ports({"x", "weight: weight_dtype", "bias?"})),
                   {"y: out_scale"},
                   rounding_fields({{"activation", std::string("silu")}, {"out_scale", 0.0}}),
                   {},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<LinearPlugin>(fields, true, false);
                   }});
}

}  // namespace llmc
