#include <random>
#include <tuple>

#include "../../kernels/gemm/params.h"
#include "../../kernels/moe/params.h"
#include "../common/quantized.h"

namespace llmc {
namespace {

// Thresholds without timing. kFewPairs: average pairs per expert up to which the GEMV is used; on
// Hopper for 4-bit and 8-bit weights. kFewOnHopper: tokens, unless activations are quantized; then
// one pair per kFewRoundedOnHopper experts.
constexpr int64_t kFewPairs = 8, kFewFourOnHopper = 4, kFewEightOnHopper = 1, kFewOnHopper = 8,
                  kFewRoundedOnHopper = 2;

// Code type of attribute weight_dtype, and whether groups have zeros.
std::pair<kernels::CodeType, bool> codes_of(const std::string& dtype) {
  using kernels::CodeType;
  static const std::map<std::string, std::pair<CodeType, bool>> kinds = {
      {"", {CodeType::kNone, false}},      {"int4", {CodeType::kInt4, false}},
      {"uint4", {CodeType::kInt4, true}},  {"int8", {CodeType::kInt8, false}},
      {"uint8", {CodeType::kInt8, true}},  {"float8_e4m3fn", {CodeType::kFloat8, false}},
      {"mxfp4", {CodeType::kMxfp4, false}}};
  const auto found = kinds.find(dtype);
  if (found == kinds.end()) throw Error("Experts has an unknown weight_dtype '" + dtype + "'");
  return found->second;
}

bool is_four(kernels::CodeType codes) {
  return codes == kernels::CodeType::kInt4 || codes == kernels::CodeType::kMxfp4;
}

class Experts : public Plugin {
 public:
  explicit Experts(const Fields& fields) {
    p_.top_k = integer(fields, "top_k");
    p_.activation = activation_of(fields);
    p_.gated = integer(fields, "gated") != 0;
    p_.alpha = real(fields, "alpha");
    p_.limit = real(fields, "limit");
    p_.up_offset = real(fields, "up_offset");
    p_.scale_input = integer(fields, "scale_input") != 0;
    sharded_ = integer(fields, "sharded") != 0;
    p_.first_expert = sharded_ ? integer(fields, "first_expert") : 0;
    if (p_.top_k < 1) throw Error("Experts' top_k " + std::to_string(p_.top_k) + " is below 1");
    std::tie(quant_.code_type, zeros_) = codes_of(std::get<std::string>(fields.at("weight_dtype")));
    const auto& rounding = std::get<std::string>(fields.at("activation_dtype"));
    p_.rounded = !rounding.empty();
    p_.quant_group = integer(fields, "activation_group_size");
    if (p_.rounded ? rounding != "float8_e4m3fn" || quant_.code_type != kernels::CodeType::kFloat8
                   : p_.quant_group != 0)
      throw Error(
          "Experts takes activation_dtype float8_e4m3fn, optionally with activation_group_size, "
          "with weights of that dtype only");
    if (!packed()) return;
    quant_.group_size = integer(fields, "group_size");
    p_.hidden = integer(fields, "in_features");
    p_.inner = integer(fields, "inner_features");
    for (int width : {p_.hidden, p_.inner})
      if (quant_.group_size < 1 || width < 1 || width % quant_.group_size != 0 || width % 2 != 0)
        throw Error("Experts' rows of " + std::to_string(width) +
                    " are not divisible into groups of " + std::to_string(quant_.group_size));
    if (p_.quant_group != 0 && p_.quant_group != quant_.group_size)
      throw Error("Experts' activations are quantized in groups of " +
                  std::to_string(p_.quant_group) + ", its weights have groups of " +
                  std::to_string(quant_.group_size));
    if (p_.rounded) check_rounded(p_.quant_group, {p_.hidden, p_.inner});
    if (quant_.code_type == kernels::CodeType::kMxfp4 && quant_.group_size != kMxfp4Group)
      throw Error("Experts in mxfp4 need groups of 32, not " + std::to_string(quant_.group_size));
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims &x = in[0], &down = in[4];
    if (x.size() != 2 || down.size() != 3)
      throw Error("Experts' x and down have " + std::to_string(x.size()) + " and " +
                  std::to_string(down.size()) + " dimensions, expected 2 and 3");
    if (down[0].known() && down[0].number() > kernels::kRouteExperts)
      throw Error(std::to_string(down[0].number()) + " experts: at most " +
                  std::to_string(kernels::kRouteExperts) + " are supported");
    const Dim inner = packed() ? Dim(p_.inner) : down[2], rows = inner * (p_.gated ? 2 : 1);
    expect("Experts' experts", in[1], {x[0], p_.top_k});
    expect("Experts' scores", in[2], {x[0], p_.top_k});
    for (size_t stack : {kGateUp, kDown}) {
      const Dim out = stack == kGateUp ? rows : x[1], width = stack == kGateUp ? x[1] : inner;
      const std::string name = stack == kGateUp ? "gate_up" : "down";
      const Dims *scale = optional(in, scale_of(stack)), *zero = optional(in, scale_of(stack) + 1);
      if ((scale != nullptr) != packed() || (zero != nullptr) != zeros_)
        throw Error(
            "Experts takes scales with weight_dtype, and zeros with uint4 and uint8 only; " + name +
            " differs");
      if (!packed()) {
        expect("Experts' " + name, in[stack], {down[0], out, width});
        continue;
      }
      const int64_t per_byte = four() ? 2 : 1, columns = stack == kGateUp ? p_.hidden : p_.inner;
      const int64_t groups = columns / quant_.group_size;
      expect("Experts' x", x, {x[0], p_.hidden});
      expect("Experts' " + name, in[stack], {down[0], out, columns / per_byte});
      expect("Experts' " + name + "_scale", *scale, {down[0], out, groups});
      if (zero != nullptr)
        expect("Experts' " + name + "_zero", *zero,
               {down[0], out, (groups + per_byte - 1) / per_byte});
    }
    if (const Dims* bias = optional(in, 5)) expect("Experts' gate_up_bias", *bias, {down[0], rows});
    if (const Dims* bias = optional(in, 6)) expect("Experts' down_bias", *bias, {down[0], x[1]});
    if (const Dims* residual = optional(in, 11)) expect("Experts' residual", *residual, x);
    if (const Dims* ids = optional(in, kLoraIds)) expect("Experts' lora_ids", *ids, {x[0]});
    for (size_t stack : {kGateUp, kDown})
      expect_adapters(in, stack, stack == kGateUp ? rows : x[1], stack == kGateUp ? x[1] : inner);
    return {x};
  }

  int64_t workspace(const std::vector<Tensor>& in) const override {
    return base_workspace(in) +
           (takes_adapters(in)
                ? kernels::experts_lora_scratch(in[0].dtype, sizes(in), adapters(in, nullptr))
                : 0);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    kernels::ExpertsParams p = sizes(in);
    p.y = out[0].data;
    p.x = in[0].data;
    p.experts = in[1].data;
    p.narrow = in[1].dtype == DType::kInt32;
    p.scores = static_cast<const float*>(in[2].data);
    p.gate_up = in[kGateUp].data;
    p.down = in[kDown].data;
    p.gate_up_quant = quant_params(in, kGateUp);
    p.down_quant = quant_params(in, kDown);
    if (const Tensor* bias = optional(in, 5)) p.gate_up_bias = bias->data;
    if (const Tensor* bias = optional(in, 6)) p.down_bias = bias->data;
    if (const Tensor* residual = optional(in, 11)) p.residual = residual->data;
    p.scratch = static_cast<char*>(workspace) + kSpread;
    const DType dtype = in[0].dtype;
    using Way = kernels::ExpertsKernel;
    if (context.adapters && takes_adapters(in)) {
      const kernels::ExpertsLoraParams lora =
          adapters(in, static_cast<char*>(workspace) + base_workspace(in));
      const Way way = has_tiles(dtype, p) ? Way::kGroupedGemm : Way::kFallback;
      return check(kernels::experts(dtype, p, way, context.stream, &lora), "Experts");
    }
    const auto run = [&](const kernels::ExpertsParams& params, Way way) {
      check(kernels::experts(dtype, params, way, context.stream), "Experts");
    };
    if (!has_tiles(dtype, p)) return run(p, Way::kFallback);
    if (int64_t{p.num_tokens} * p.top_k > kernels::kExpertsGemvPairs)
      return run(p, Way::kGroupedGemm);
    const std::vector<int64_t> shape = way_shape(dtype, p);
    const bool times = context.gemm->would_time(shape, context.stream);
    kernels::ExpertsParams others = p;
    if (times)
      others.experts = choices_of_unlike(p, static_cast<int32_t*>(workspace), context),
      others.narrow = true;
    const auto by = [&](Way way) {
      return [&, way] {
        if (times) run(others, way);
        run(p, way);
      };
    };
    context.gemm->choose(shape, context.stream, by(Way::kGemv), by(Way::kGroupedGemm), /*saved=*/0,
                         is_usually_few(p));
  }

  void prepare(const std::vector<Tensor>& in, std::set<const void*>& done,
               cudaStream_t stream) const override {
    for (size_t stack : {kGateUp, kDown}) {
      if (!packed() || !done.insert(in[stack].data).second) continue;
      const Tensor &weight = in[stack], &scale = in[scale_of(stack)];
      const int num_experts = static_cast<int>(weight.shape[0]),
                out = static_cast<int>(weight.shape[1]);
      const int width_here = stack == kGateUp ? p_.hidden : p_.inner;
      if (!kernels::has_expert_tiles(quant_.code_type, quant_.group_size, out, width_here))
        continue;
      void* spare = nullptr;
      check(cudaMalloc(&spare,
                       std::max(weight.size(), scale.size() * width(scale.dtype)) / num_experts),
            "repacking");
      cudaError_t error =
          kernels::tile_experts(weight.data, scale.data, spare, quant_.code_type, quant_.group_size,
                                num_experts, out, width_here, stream);
      if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
      cudaFree(spare);
      check(error, "repacking");
    }
  }

 private:
  static constexpr size_t kGateUp = 3, kDown = 4, kLoraIds = 18;
  static constexpr int kMxfp4Group = 32;
  static constexpr int64_t kSpread =
      kernels::kExpertsGemvPairs * sizeof(int32_t);  // bytes of routing to time with
  static size_t scale_of(size_t stack) { return stack == kGateUp ? 7 : 9; }
  // Adapters' matrices down, up and ranks, of the form in slots.
  static size_t adapters_of(size_t stack) { return stack == kGateUp ? 19 : 22; }
  static bool takes_adapters(const std::vector<Tensor>& in) {
    return optional(in, adapters_of(kDown)) != nullptr;
  }

  // Throws Error unless the adapters of a stack [num_experts, out, width] have its sizes.
  static void expect_adapters(const std::vector<Dims>& in, size_t stack, const Dim& out,
                              const Dim& width) {
    const size_t first = adapters_of(stack);
    const Dims *ids = optional(in, kLoraIds), *down = optional(in, first),
               *up = optional(in, first + 1), *ranks = optional(in, first + 2);
    const bool present = optional(in, adapters_of(kDown)) != nullptr;
    if ((down != nullptr) != present || (up != nullptr) != present || (ranks != nullptr) != present)
      throw Error("Experts takes adapters' matrices and ranks of both gate_up and down, or none");
    if (!present) return;
    if (ids == nullptr) throw Error("Experts takes lora_ids with adapters");
    const Dim &experts = in[kDown][0], &slots = (*down)[1], &rank = (*down)[2];
    expect("Experts' lora_down", *down, {experts, slots, rank, width});
    if (experts.known()) expect("Experts' lora_up", *up, {slots, out * experts.number(), rank});
    expect("Experts' lora_ranks", *ranks, {slots});
    expect("Experts' slots of adapters", {slots}, {(*optional(in, adapters_of(kDown)))[1]});
    if (rank.known() && rank.number() % 8 != 0)
      throw Error("slots of adapters have room for rank " + std::to_string(rank.number()) +
                  ", expected a multiple of 8");
  }

  // Parameters with sizes, without pointers.
  kernels::ExpertsParams sizes(const std::vector<Tensor>& in) const {
    kernels::ExpertsParams p = p_;
    p.num_tokens = static_cast<int>(in[0].shape[0]);
    p.num_experts = static_cast<int>(in[kDown].shape[0]);
    p.hidden = static_cast<int>(in[kDown].shape[1]);
    p.inner = inner_of(in);
    return p;
  }

  int64_t base_workspace(const std::vector<Tensor>& in) const {
    const kernels::ExpertsParams p = sizes(in);
    return kSpread + kernels::experts_scratch(in[0].dtype, p.num_tokens, p.top_k, p.num_experts,
                                              p.hidden, p.inner, p.rounded);
  }

  static kernels::ExpertsLoraParams adapters(const std::vector<Tensor>& in, void* scratch) {
    const auto stack = [&](size_t of) {
      const size_t first = adapters_of(of);
      return kernels::ExpertsLoraStack{in[first].data, in[first + 1].data,
                                       static_cast<const int32_t*>(in[first + 2].data),
                                       static_cast<int>(in[first].shape[2])};
    };
    return {stack(kGateUp), stack(kDown), static_cast<const int32_t*>(in[kLoraIds].data),
            static_cast<int>(in[adapters_of(kDown)].shape[1]), scratch};
  }

  bool packed() const { return quant_.code_type != kernels::CodeType::kNone; }
  bool four() const { return is_four(quant_.code_type); }
  int inner_of(const std::vector<Tensor>& in) const {
    return packed() ? p_.inner : static_cast<int>(in[kDown].shape[2]);
  }

  kernels::ExpertsQuantParams quant_params(const std::vector<Tensor>& in, size_t stack) const {
    kernels::ExpertsQuantParams made = quant_;
    if (!packed()) return made;
    made.scale = in[scale_of(stack)].data;
    if (const Tensor* zero = optional(in, scale_of(stack) + 1))
      made.zero = static_cast<const uint8_t*>(zero->data);
    return made;
  }

  // Whether the tensor core kernels support these sizes.
  static bool has_tiles(DType dtype, const kernels::ExpertsParams& p) {
    if (dtype == DType::kFloat32 || p.hidden % 8 != 0 || p.inner % 8 != 0) return false;
    const kernels::ExpertsQuantParams& quant = p.gate_up_quant;
    return quant.code_type == kernels::CodeType::kNone ||
           (kernels::has_expert_tiles(quant.code_type, quant.group_size,
                                      p.gated ? 2 * p.inner : p.inner, p.hidden) &&
            kernels::has_expert_tiles(quant.code_type, quant.group_size, p.hidden, p.inner));
  }

  static bool is_usually_few(const kernels::ExpertsParams& p) {
    const int64_t pairs = int64_t{p.num_tokens} * p.top_k;
    const kernels::CodeType codes = p.gate_up_quant.code_type;
    if (!kernels::has_experts_gemm_sm90(p))
      return p.num_tokens <= kernels::kGemvRows || pairs <= kFewPairs * p.num_experts;
    if (is_four(codes)) return pairs <= kFewFourOnHopper * p.num_experts;
    if (p.rounded) return kFewRoundedOnHopper * pairs <= p.num_experts;
    return p.num_tokens <= kFewOnHopper ||
           (codes != kernels::CodeType::kNone && pairs <= kFewEightOnHopper * p.num_experts);
  }

  // The key of the choice between GEMV and grouped GEMM (Gemm::choose()). No other op sets this
  // bit.
  static std::vector<int64_t> way_shape(DType dtype, const kernels::ExpertsParams& p) {
    constexpr int64_t kOfExperts = 1 << 14;
    const kernels::ExpertsQuantParams& quant = p.gate_up_quant;
    const int64_t kind =
        kOfExperts + p.gated + 2 * (quant.zero != nullptr) + 4 * (quant.group_size == kMxfp4Group) +
        16 * static_cast<int64_t>(quant.code_type) + 512 * p.rounded + 1024 * (p.quant_group != 0);
    return {static_cast<int64_t>(dtype), p.hidden, p.inner,
            kind | int64_t{p.num_experts} << 20 | int64_t{p.top_k} << 40, p.num_tokens};
  }

  // Routing of dissimilar tokens, written to `at`. In a timed step all tokens are alike and are
  // routed to the same experts, as completions of one prompt nearly are. Here the r most frequent
  // of all experts receive a share of sqrt(r / all), since a model's experts are not used evenly.
  // Experts of similar frequency are on different ranks.
  const int32_t* choices_of_unlike(const kernels::ExpertsParams& p, int32_t* at,
                                   const Context& context) const {
    int ranks = 1;
    if (sharded_ && context.communicator != nullptr)
      check(ncclCommCount(context.communicator, &ranks), "querying a communicator");
    const int all = p.num_experts * ranks;
    std::mt19937 random;
    std::vector<int32_t> experts;
    for (int token = 0; token < p.num_tokens; ++token) {
      std::vector<bool> chosen(all);
      for (int i = 0; i < p.top_k; ++i) {
        const double uniform = random() / 4294967296.0;
        int next = static_cast<int>(all * uniform * uniform);
        for (int tried = 0; chosen[next] && tried < all; ++tried) next = (next + 1) % all;
        chosen[next] = true;
        experts.push_back(next % ranks * p.num_experts + next / ranks);
      }
    }
    check(cudaMemcpyAsync(at, experts.data(), experts.size() * sizeof(int32_t),
                          cudaMemcpyHostToDevice, context.stream),
          "routing for timing");
    return at;
  }

  kernels::ExpertsParams p_{};
  kernels::ExpertsQuantParams quant_{};
  bool zeros_ = false, sharded_ = false;
};

}  // namespace

void register_experts() {
  register_plugin({"Experts",
                   3,
                   {"x",
                    "experts: int64 int32",
                    "scores: float32",
                    "gate_up: weight_dtype",
                    "down: weight_dtype",
                    "gate_up_bias?",
                    "down_bias?",
                    "gate_up_scale?: scale_dtype",
                    "gate_up_zero?: uint8",
                    "down_scale?: scale_dtype",
                    "down_zero?: uint8",
                    "residual?",
                    "gate_up_lora_a?",
                    "gate_up_lora_b?",
                    "gate_up_lora_owner?: int32",
                    "down_lora_a?",
                    "down_lora_b?",
                    "down_lora_owner?: int32",
                    "lora_ids?: int32",
                    "gate_up_lora_down?",
                    "gate_up_lora_up?",
                    "gate_up_lora_ranks?: int32",
                    "down_lora_down?",
                    "down_lora_up?",
                    "down_lora_ranks?: int32"},
                   {"y"},
                   {{"top_k", int64_t{0}},
                    {"activation", std::string("silu")},
                    {"gated", int64_t{1}},
                    {"alpha", 1.0},
                    {"limit", 0.0},
                    {"up_offset", 0.0},
                    {"scale_input", int64_t{0}},
                    {"first_expert", int64_t{0}},
                    {"sharded", int64_t{0}},
                    {"weight_dtype", std::string("")},
                    {"group_size", int64_t{0}},
                    {"in_features", int64_t{0}},
                    {"inner_features", int64_t{0}},
                    {"activation_dtype", std::string("")},
                    {"activation_group_size", int64_t{0}}},
                   {"top_k"},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<Experts>(fields);
                   }});
}

}  // namespace llmc
