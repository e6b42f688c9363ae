// Brings packed weights of experts into the tiles that their kernels read: see experts.cuh.
#include "experts.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

// A unit of 8 codes a thread: of one expert's weight [out, in] as csrc/plugins/quantization.py has it.
template <Codes kCodes>
__global__ void __launch_bounds__(256) pack_kernel(uint32_t* to, const uint32_t* from, int out, int in) {
  constexpr int kBit = kBits<kCodes>, kWords = kBit / 4, kStep = kExpertsStep<kCodes>;
  wait_for_inputs();
  let_next_start();
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (unit >= static_cast<int64_t>(out) * in / 8) return;
  const int row = static_cast<int>(unit / (in / 8)), column = static_cast<int>(unit % (in / 8)) * 8;
  const auto natural = load<uint32_t, kWords>(from + unit * kWords);
  Vec<uint32_t, kWords> packed{};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = i * kBit, place = place_of(i, 8) * kBit;
    packed.data[place / 32] |= (natural.data[at / 32] >> at % 32 & ((1u << kBit) - 1)) << place % 32;
  }
  if constexpr (kCodes == Codes::kMxfp4) packed.data[0] = scattered(packed.data[0]);
  const int tile = row / kExpertsRows, thread = row % 8 * 4 + column % 32 / 8;
  const int64_t vector = (static_cast<int64_t>(tile) * (in / kStep) + column / kStep) * 32 + thread;
  const int word = row % kExpertsRows / 8 * 2 + (kBit == 4 ? column % kStep / 32 : 0);
  store(to + vector * 4 + word, packed);
}

// Scales [out, groups] of one expert.
template <typename S>
__global__ void __launch_bounds__(256) pack_scales_kernel(S* to, const S* from, int out, int groups) {
  wait_for_inputs();
  let_next_start();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= static_cast<int64_t>(out) * groups) return;
  const int row = static_cast<int>(i / groups), group = static_cast<int>(i % groups);
  to[(static_cast<int64_t>(row / kExpertsRows) * groups + group) * kExpertsRows + row % kExpertsRows] = from[i];
}

}  // namespace

bool experts_tiled(Codes codes, int group_size, int out, int in) {
  const bool four = codes == Codes::kFour || codes == Codes::kMxfp4;
  const bool power = group_size >= 32 && (group_size & (group_size - 1)) == 0;
  return codes != Codes::kNone && power && in % group_size == 0 && in % (four ? 64 : 32) == 0 && out % kExpertsRows == 0;
}

cudaError_t pack_experts(void* weight, void* scale, void* spare, Codes codes, int group_size, int num_experts, int out,
                         int in, cudaStream_t stream) {
  return with_expert_codes(codes, [&](auto constant) {
    constexpr Codes kCodes = constant.value;
    constexpr int64_t kScale = kCodes == Codes::kMxfp4 ? 1 : 4;
    const int groups = in / group_size;
    const int64_t bytes = static_cast<int64_t>(out) * in * kBits<kCodes> / 8, scales = static_cast<int64_t>(out) * groups;
    using S = std::conditional_t<kScale == 1, uint8_t, float>;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      char* own = static_cast<char*>(weight) + expert * bytes;
      cudaError_t error = cudaMemcpyAsync(spare, own, bytes, cudaMemcpyDeviceToDevice, stream);
      if (error == cudaSuccess)
        error = launch(pack_kernel<kCodes>, blocks_for(static_cast<int64_t>(out) * in / 8, 256), 256, 0, stream,
                       reinterpret_cast<uint32_t*>(own), static_cast<const uint32_t*>(spare), out, in);
      S* own_scale = static_cast<S*>(scale) + expert * scales;
      if (error == cudaSuccess)
        error = cudaMemcpyAsync(spare, own_scale, scales * kScale, cudaMemcpyDeviceToDevice, stream);
      if (error == cudaSuccess)
        error = launch(pack_scales_kernel<S>, blocks_for(scales, 256), 256, 0, stream, own_scale,
                       static_cast<const S*>(spare), out, groups);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

}  // namespace llmc::kernels
