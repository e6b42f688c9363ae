#include "../common/plugin.h"
#include "../../kernels/rowwise/pool.h"

namespace llmc {
namespace {

kernels::PoolKind kind_of(const Fields& fields) {
  static const std::map<std::string, kernels::PoolKind> kinds = {
      {"cls", kernels::PoolKind::kCls},
      {"mean", kernels::PoolKind::kMean},
      {"last", kernels::PoolKind::kLast}};
  const auto& name = std::get<std::string>(fields.at("kind"));
  const auto found = kinds.find(name);
  if (found == kinds.end()) throw Error("Pool has kind '" + name + "', expected cls, mean or last");
  return found->second;
}

class Pool : public Plugin {
 public:
  explicit Pool(const Fields& fields) : kind_(kind_of(fields)) {}

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    expect("Pool's x", in[0], {in[0][0], in[0][1]});
    expect("Pool's cu_seqlens", in[1], {in[1][0]});
    return {{in[1][0] - 1, in[0][1]}};
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    kernels::PoolParams p{};
    p.y = out[0].data;
    p.x = in[0].data;
    p.cu_seqlens = static_cast<const int32_t*>(in[1].data);
    p.batch = static_cast<int>(out[0].shape[0]);
    p.hidden = static_cast<int>(in[0].shape[1]);
    p.kind = kind_;
    check(kernels::pool(in[0].dtype, p, context.stream), "Pool");
  }

 private:
  kernels::PoolKind kind_;
};

}  // namespace

void register_pool() {
  register_plugin({"Pool",
                   1,
                   {"x", "cu_seqlens: int32"},
                   {"y"},
                   {{"kind", std::string("mean")}},
                   {},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<Pool>(fields);
                   }});
}

}  // namespace llmc
