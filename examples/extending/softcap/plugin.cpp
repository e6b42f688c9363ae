#include "plugins/common/plugin.h"

cudaError_t softcap(float* y, const float* x, float cap, long long size, cudaStream_t stream);

namespace llmc {
namespace {

class Softcap : public Plugin {
 public:
  explicit Softcap(const Fields& fields) : cap_(std::get<double>(fields.at("cap"))) {}

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override { return {in[0]}; }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    if (out[0].dtype != DType::kFloat32) throw Error("Softcap serves float32");
    check(softcap(static_cast<float*>(out[0].data), static_cast<const float*>(in[0].data), cap_,
                  out[0].size(), context.stream),
          "Softcap");
  }

 private:
  float cap_;
};

}  // namespace

void register_softcap() {
  register_plugin({"Softcap", 1, {"x"}, {"y"}, {{"cap", 30.0}}, {},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<Softcap>(fields);
                   }});
}

}  // namespace llmc
