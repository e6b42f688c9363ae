// Mixture of experts: routing and grouped GEMMs. See rowwise/params.h for the conventions of
// launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/dtype.h"
#include "../common/quantization.h"

namespace llmc::kernels {

// Top-k routing; see csrc/plugins/route/op.py for the contract.
enum class RouteScore : int32_t { kSoftmax, kSigmoid, kSqrtSoftplus, kSparseMixer };
constexpr int kRouteExperts = 1024, kRouteTopK = 32;  // maximum num_experts and top_k
struct RouteParams {
  void* experts;              // int64, or int32 with `narrow`, [num_tokens, top_k]
  float* scores;              // [num_tokens, top_k]
  const void* logits;         // T [num_tokens, num_experts]
  const float* bias;          // [num_experts] or null
  const float* expert_scale;  // [num_experts] or null
  int num_tokens, num_experts, top_k, groups, top_groups;
  RouteScore score;
  bool top2;  // rank groups by the sum of their two highest scores, not by the highest
  bool normalize, narrow;
  float epsilon, scale, jitter;
};
cudaError_t route(DType dtype, const RouteParams& params, cudaStream_t stream);

// Quantization parameters of a weight stack [num_experts, out, in]. Scales [num_experts, out, in /
// group_size] are float32; for kMxfp4 they are exponent bytes. tile_experts() permutes both into
// tiles where has_expert_tiles(): see experts.cuh.
struct ExpertsQuantParams {
  CodeType code_type = CodeType::kNone;
  const void* scale = nullptr;
  const uint8_t* zero = nullptr;  // null: 8 for kInt4, 128 for kInt8
  int group_size = 0;
};
bool has_expert_tiles(CodeType codes, int group_size, int out, int in);
// In place; call once. `spare` has room for one expert's weight, and for its scales.
cudaError_t tile_experts(void* weight, void* scale, void* spare, CodeType codes, int group_size,
                         int num_experts, int out, int in, cudaStream_t stream);

// Which of the two GEMMs to run.
enum class ExpertsGemms { kBoth, kFirst, kSecond };

// Experts' MLPs and the weighted sum of each token's top_k; see csrc/plugins/experts/op.py for the
// contract. Experts outside [first_expert, first_expert + num_experts) contribute nothing. With
// `rounded`, the activations of both GEMMs are quantized to FP8 (e4m3) with dynamic scales max|..|
// / 448, per quant_group columns, or per row where that is 0.
struct ExpertsParams {
  void* y;              // T [num_tokens, hidden]
  const void* x;        // T [num_tokens, hidden]
  const void* experts;  // int64, or int32 with `narrow`, [num_tokens, top_k]
  const float* scores;  // [num_tokens, top_k]
  const void* gate_up;  // T [num_experts, inner, hidden], gated [num_experts, 2 * inner, hidden]
  const void* down;     // T [num_experts, hidden, inner]
  const void* gate_up_bias;  // T [num_experts, inner or 2 * inner] or null
  const void* down_bias;     // T [num_experts, hidden] or null
  const void* residual;      // T [num_tokens, hidden] or null, added to the sums; may alias y
  void* scratch;             // experts_scratch() bytes
  int num_tokens, top_k, num_experts, first_expert, hidden, inner;
  Activation activation;
  float alpha, limit, up_offset;
  bool gated, scale_input, narrow;
  bool rounded = false;
  int quant_group = 0;
  ExpertsQuantParams gate_up_quant = {}, down_quant = {};
  ExpertsGemms gemms = ExpertsGemms::kBoth;
};
// LoRA adapters of one of the two GEMMs: down T [num_experts, slots, rank, in], up T [slots,
// num_experts, out, rank], and the ranks that each slot uses; see gemm/lora.h.
struct ExpertsLoraStack {
  const void *down, *up;
  const int32_t* ranks;  // [slots]
  int rank;
};
// The adapters of tokens: ids[t] is the slot of token t's, -1: none.
struct ExpertsLoraParams {
  ExpertsLoraStack gate_up, down;
  const int32_t* ids;  // [num_tokens]
  int slots;
  void* scratch;  // experts_lora_scratch() bytes
};
int64_t experts_lora_scratch(DType dtype, const ExpertsParams& params,
                             const ExpertsLoraParams& lora);

// kGemv: few tokens, bound by reading weights. kGroupedGemm: many tokens, tensor core tiles.
// kFallback: any size and dtype. kGemv and kGroupedGemm take 16-bit types with hidden and inner
// multiples of 8, or quantized weights in tiles.
constexpr int kExpertsGemvPairs = 2048;  // maximum num_tokens * top_k for kGemv
enum class ExpertsKernel { kGemv, kGroupedGemm, kFallback };
// With `lora`, kGroupedGemm or kFallback.
cudaError_t experts(DType dtype, const ExpertsParams& params, ExpertsKernel way,
                    cudaStream_t stream, const ExpertsLoraParams* lora = nullptr);
// Whether the GPU is a Hopper, whose kGroupedGemm kernel is the faster one from few tokens on for
// 16-bit weights.
bool has_experts_gemm_sm90(const ExpertsParams& params);
int64_t experts_scratch(DType dtype, int num_tokens, int top_k, int num_experts, int hidden,
                        int inner, bool rounded);

}  // namespace llmc::kernels
