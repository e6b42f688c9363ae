#include "../common/embeds.h"

namespace llmc {
namespace {

class AddEmbeds : public EmbedsOp {
 public:
  AddEmbeds() : EmbedsOp("AddEmbeds", kernels::add_embeds) {}
  bool passes_on(const Context& context) const override { return !context.deep_embeds; }
};

}  // namespace

void register_add_embeds() {
  register_plugin(
      {"AddEmbeds",
       1,
       {"x", "embeds", "embed_ids: int32"},
       {"y"},
       {},
       {},
       [](const Fields&) -> std::unique_ptr<Plugin> { return std::make_unique<AddEmbeds>(); }});
}

}  // namespace llmc
