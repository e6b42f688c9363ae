#include "../../kernels/rowwise/params.h"
#include "../common/lora.h"

namespace llmc {
namespace {

std::vector<Port> ports() {
  std::vector<Port> made = quantizable_ports({"input_ids: int64 int32", "table: weight_dtype",
                                              "position_ids?: int64 int32", "position_table?"});
  for (const char* port : {"lora_a?", "lora_b?", "lora_owner?: int32", "lora_ids?: int32",
                           "lora_down?", "lora_up?", "lora_ranks?: int32"})
    made.emplace_back(port);
  return made;
}

class Embedding : public Plugin {
 public:
  explicit Embedding(const Fields& fields)
      : scale_(real(fields, "scale")),
        start_(std::get<int64_t>(fields.at("vocab_start"))),
        sharded_(integer(fields, "vocab_sharded") != 0),
        quantized_(fields, 4),
        adapters_(7) {}

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims table = quantized_.matrix(in, 1), y{in[0][0], table[1]};
    expect("Embedding's input_ids", in[0], {in[0][0]});
    expect("Embedding's table", table, {table[0], table[1]});
    adapters_.expect_shapes(in, {table[1], table[0]});
    if (const Dims* positions = optional(in, 3)) {
      if (optional(in, 2) == nullptr) throw Error("Embedding's position_table needs position_ids");
      expect("Embedding's position_ids", in[2], in[0]);
      expect("Embedding's position_table", *positions, {(*positions)[0], table[1]});
    }
    return {y};
  }

  void prepare(const std::vector<Tensor>& in, std::set<const void*>& done,
               cudaStream_t stream) const override {
    quantized_.prepare(in, 1, done, stream);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    const bool placed = in.size() > 3 && in[3].data != nullptr;
    kernels::EmbeddingParams p{};
    p.y = out[0].data;
    p.ids = in[0].data;
    p.table = in[1].data;
    p.position_ids = placed ? in[2].data : nullptr;
    p.narrow_ids = in[0].dtype == DType::kInt32;
    if (placed && in[2].dtype != in[0].dtype)
      throw Error("Embedding's input_ids and position_ids differ in dtype");
    p.positions = placed ? in[3].data : nullptr;
    p.position_rows = placed ? in[3].shape[0] : 0;
    p.rows = in[1].shape[0];
    p.quant = quantized_.quant_params(in);
    p.vocab_start = sharded_ ? start_ : 0;
    p.num_tokens = static_cast<int>(in[0].shape[0]);
    p.hidden = static_cast<int>(out[0].shape[1]);
    p.scale = scale_;
    if (context.adapters && optional(in, 11) != nullptr) {
      p.lora_ids = static_cast<const int32_t*>(in[10].data);
      p.down = in[11].data;
      p.up = in[12].data;
      p.ranks = static_cast<const int32_t*>(in[13].data);
      p.rank = static_cast<int>(in[11].shape[2]);
    }
    check(kernels::embedding(out[0].dtype, p, context.stream), "Embedding");
  }

 private:
  float scale_;
  int64_t start_;
  bool sharded_;
  Quantized quantized_;
  Adapters adapters_;
};

}  // namespace

void register_embedding() {
  register_plugin(
      {"Embedding",
       1,
       ports(),
       {"y"},
       quantizable_fields(
           {{"scale", 1.0}, {"vocab_start", int64_t{0}}, {"vocab_sharded", int64_t{0}}}),
       {},
       [](const Fields& fields) -> std::unique_ptr<Plugin> {
         return std::make_unique<Embedding>(fields);
       }});
}

}  // namespace llmc
