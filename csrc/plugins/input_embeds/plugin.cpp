#include "../common/plugin.h"
#include "../../kernels/rowwise/params.h"

namespace llmc {
namespace {

class InputEmbeds : public Plugin {
 public:
  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    expect("InputEmbeds's x", in[0], {in[0][0], in[0][1]});
    expect("InputEmbeds's embeds", in[1], {in[1][0], in[0][1]});
    expect("InputEmbeds's embed_ids", in[2], {in[0][0]});
    return {in[0]};
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    kernels::InputEmbedsParams p{};
    p.y = out[0].data;
    p.x = in[0].data;
    p.embeds = in[1].data;
    p.ids = static_cast<const int32_t*>(in[2].data);
    p.num_tokens = static_cast<int>(in[0].shape[0]);
    p.hidden = static_cast<int>(in[0].shape[1]);
    check(kernels::input_embeds(out[0].dtype, p, context.stream), "InputEmbeds");
  }

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
