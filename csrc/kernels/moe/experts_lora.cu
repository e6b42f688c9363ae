// LoRA adapters of experts. A pair has the adapter of its token, with the matrices of its expert.
//
// The GEMMs run one after the other: the first one's sums are written without the activation, the
// adapters' product is added, and the activation follows; the second one's adapters read its input
// before quantization, and their product is added to its output. The products are those of linear
// layers (gemm/lora.cu), whose slots are here an expert and an adapter.
#include <algorithm>

#include "../gemm/lora.h"
#include "experts.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kMaxGridRows = 65535, kThreads = 256;

struct Scratch {
  void* both;       // T [pairs, rows of gate_up], by position: sums of the first GEMM
  int32_t* ids;     // [pairs]: expert * slots + slot; -1: none
  int32_t* tokens;  // [pairs]
  int32_t* order;   // [pairs], of plan_lora_tiles(), as tiles
  LoraTile* tiles;
  float* hidden;  // [splits, pairs, rank]
};

int rows_of_gate_up(const ExpertsParams& p) { return p.gated ? 2 * p.inner : p.inner; }

// Lays out the scratch buffer, and returns its size.
int64_t layout_scratch(DType dtype, const ExpertsParams& p, const ExpertsLoraParams& lora,
                       Scratch* made) {
  const int pairs = p.num_tokens * p.top_k, split = std::min(pairs, kLoraSplitRows);
  int64_t bytes = 0;
  auto take = [&](int64_t size) {
    void* at = static_cast<char*>(lora.scratch) + bytes;
    bytes += (size + 255) / 256 * 256;
    return at;
  };
  made->both = take(int64_t{pairs} * rows_of_gate_up(p) * (dtype == DType::kFloat32 ? 4 : 2));
  made->ids = static_cast<int32_t*>(take(int64_t{pairs} * 4));
  made->tokens = static_cast<int32_t*>(take(int64_t{pairs} * 4));
  made->order = static_cast<int32_t*>(take(int64_t{pairs} * 4));
  made->tiles = static_cast<LoraTile*>(take(int64_t{lora_tiles(pairs, p.num_experts * lora.slots)} *
                                            static_cast<int64_t>(sizeof(LoraTile))));
  const int splits = std::max(lora_splits(split, p.hidden), lora_splits(split, p.inner));
  made->hidden = static_cast<float*>(take(int64_t{std::max(pairs, split * splits)} *
                                          std::max(lora.gate_up.rank, lora.down.rank) * 4));
  return bytes;
}

// Whether the kernels for many rows run.
bool has_tiles(DType dtype, const ExpertsParams& p, const ExpertsLoraParams& lora) {
  return dtype != DType::kFloat32 && p.hidden % 8 == 0 && p.inner % 8 == 0 &&
         p.num_tokens * p.top_k > kLoraFewRows &&
         int64_t{p.num_experts} * lora.slots <= kMaxLoraSlots;
}

__global__ void __launch_bounds__(kThreads)
    pair_rows_kernel(ExpertsParams p, const int32_t* ids, int slots, Scratch to) {
  pdl_wait();
  pdl_launch_dependents();
  const int pair = blockIdx.x * kThreads + threadIdx.x;
  if (pair >= p.num_tokens * p.top_k) return;
  const int token = pair / p.top_k, expert = expert_of(p, pair), slot = ids[token];
  to.ids[pair] = expert < 0 || slot < 0 ? -1 : expert * slots + slot;
  to.tokens[pair] = token;
}

// The function between the two GEMMs, of sums in the order of positions. A thread makes one value.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    activate_pairs_kernel(ExpertsParams p, const T* both, T* inner) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= int64_t{p.num_tokens} * p.top_k * p.inner) return;
  const float value = to_float(both[p.gated ? 2 * i : i]);
  inner[i] = from_float<T>(activate_inner(p, value, p.gated ? to_float(both[2 * i + 1]) : 0.f));
}

// Calls f with the parameters of at most kMaxGridRows rows each.
template <typename F>
cudaError_t by_rows(const LoraParams& all, int width, F&& f) {
  for (int first = 0; first < all.rows; first += kMaxGridRows) {
    LoraParams p = all;
    const auto from = [&](const void* rows, int64_t elements) {
      return static_cast<const char*>(rows) + first * elements * width;
    };
    p.rows = std::min(all.rows - first, kMaxGridRows);
    p.ids += first;
    p.hidden += int64_t{first} * p.rank;
    if (p.row_scale != nullptr) p.row_scale += first;
    if (p.x_rows != nullptr) p.x_rows += first;
    else p.x = from(p.x, p.in);
    if (p.z_rows != nullptr) p.z_rows += first;
    else p.z = p.y = const_cast<char*>(from(p.z, p.out));
    const cudaError_t error = f(p);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t shrink(DType dtype, const LoraParams& p, bool tiled, cudaStream_t stream) {
  if (tiled) return lora_shrink_tiles(dtype, p, stream);
  return by_rows(p, dtype == DType::kFloat32 ? 4 : 2,
                 [&](const LoraParams& part) { return lora_shrink_rows(dtype, part, stream); });
}

cudaError_t expand(DType dtype, const LoraParams& p, bool tiled, cudaStream_t stream) {
  if (tiled) return lora_expand_tiles(dtype, p, stream);
  return by_rows(p, dtype == DType::kFloat32 ? 4 : 2,
                 [&](const LoraParams& part) { return lora_expand_rows(dtype, part, stream); });
}

}  // namespace

int64_t experts_lora_scratch(DType dtype, const ExpertsParams& p, const ExpertsLoraParams& lora) {
  Scratch made;
  return layout_scratch(dtype, p, lora, &made);
}

cudaError_t adapted_gemms(
    DType dtype, const ExpertsParams& p, const void* x, const Pairs& pairs,
    const ExpertsLoraParams& lora, cudaStream_t stream,
    const std::function<cudaError_t(const ExpertsParams&, const Pairs&)>& gemms) {
  Scratch scratch;
  layout_scratch(dtype, p, lora, &scratch);
  const int rows = p.num_tokens * p.top_k, slots = p.num_experts * lora.slots;
  const bool tiled = has_tiles(dtype, p, lora);
  // A single token is not sorted.
  const int32_t* positions = p.num_tokens > 1 ? pairs.positions : nullptr;
  cudaError_t error = launch(pair_rows_kernel, ceil_div(rows, kThreads), kThreads, 0, stream, p,
                             lora.ids, lora.slots, scratch);
  if (error == cudaSuccess && tiled)
    error = plan_lora_tiles(scratch.ids, rows, slots, scratch.order, scratch.tiles, stream);
  if (error != cudaSuccess) return error;

  ExpertsParams part = p;
  Pairs sums = pairs;
  part.gemms = ExpertsGemms::kFirst;
  part.gated = false;
  part.activation = Activation::kNone;
  part.inner = rows_of_gate_up(p);
  sums.inner = scratch.both;
  error = gemms(part, sums);
  if (error != cudaSuccess) return error;

  LoraParams first{};
  first.x = x, first.x_rows = scratch.tokens;
  first.z = first.y = scratch.both, first.z_rows = positions;
  first.ids = scratch.ids, first.hidden = scratch.hidden;
  first.order = scratch.order, first.tiles = scratch.tiles;
  first.rows = rows, first.parts = 1, first.slots = slots, first.experts = p.num_experts;
  first.waits = true;
  LoraParams second = first;
  first.down = lora.gate_up.down, first.up = lora.gate_up.up, first.ranks = lora.gate_up.ranks;
  first.in = p.hidden, first.out = rows_of_gate_up(p), first.rank = lora.gate_up.rank;
  if (p.scale_input) first.row_scale = p.scores;
  second.x = pairs.inner, second.x_rows = positions;
  second.z = second.y = pairs.outputs, second.z_rows = nullptr;
  second.down = lora.down.down, second.up = lora.down.up, second.ranks = lora.down.ranks;
  second.in = p.inner, second.out = p.hidden, second.rank = lora.down.rank;

  error = shrink(dtype, first, tiled, stream);
  if (error == cudaSuccess) error = expand(dtype, first, tiled, stream);
  if (error == cudaSuccess)
    error = dispatch_dtype(dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      return launch(activate_pairs_kernel<T>, ceil_div(int64_t{rows} * p.inner, kThreads), kThreads,
                    0, stream, p, static_cast<const T*>(scratch.both),
                    static_cast<T*>(pairs.inner));
    });
  if (error == cudaSuccess) error = shrink(dtype, second, tiled, stream);
  if (error != cudaSuccess) return error;
  part = p;
  part.gemms = ExpertsGemms::kSecond;
  error = gemms(part, pairs);
  return error != cudaSuccess ? error : expand(dtype, second, tiled, stream);
}

}  // namespace llmc::kernels
