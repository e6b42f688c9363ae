#include "../common/embeds.h"

namespace llmc {
namespace {

class InputEmbeds : public EmbedsOp {
 public:
  InputEmbeds() : EmbedsOp("InputEmbeds", kernels::input_embeds) {}
  bool passes_on(const Context& context) const override { return !context.embeds; }
};

}  // namespace

void register_input_embeds() {
  register_plugin(
      {"InputEmbeds",
       1,
       {"x", "embeds", "embed_ids: int32"},
       {"y"},
       {},
       {},
       [](const Fields&) -> std::unique_ptr<Plugin> { return std::make_unique<InputEmbeds>(); }});
}

}  // namespace llmc
