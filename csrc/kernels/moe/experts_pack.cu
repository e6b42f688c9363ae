// Permutes quantized expert weights to tiles: see experts.cuh.
#include "experts.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

// One thread per unit of 8 codes of one expert's weight [out, in], in the layout of
// csrc/plugins/quantization.py.
template <CodeType kCodeType>
__global__ void __launch_bounds__(256)
    tile_experts_kernel(uint32_t* to, const uint32_t* from, int out, int in) {
  constexpr int kBit = kBits<kCodeType>, kWords = kBit / 4, kStep = kExpertTileColumns<kCodeType>;
  pdl_wait();
  pdl_launch_dependents();
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (unit >= static_cast<int64_t>(out) * in / 8) return;
  const int row = static_cast<int>(unit / (in / 8)), column = static_cast<int>(unit % (in / 8)) * 8;
  const auto natural = load<uint32_t, kWords>(from + unit * kWords);
  Vec<uint32_t, kWords> packed{};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = i * kBit, position = packed_column(i, 8) * kBit;
    packed.data[position / 32] |= (natural.data[at / 32] >> at % 32 & ((1u << kBit) - 1))
                                  << position % 32;
  }
  if constexpr (kCodeType == CodeType::kMxfp4) packed.data[0] = scatter_mxfp4_bits(packed.data[0]);
  const int tile = row / kExpertTileRows, thread = row % 8 * 4 + column % 32 / 8;
  const int64_t vector = (static_cast<int64_t>(tile) * (in / kStep) + column / kStep) * 32 + thread;
  const int word = row % kExpertTileRows / 8 * 2 + (kBit == 4 ? column % kStep / 32 : 0);
  store(to + vector * 4 + word, packed);
}

// Scales [out, groups] of one expert.
template <typename S>
__global__ void __launch_bounds__(256)
    tile_scales_kernel(S* to, const S* from, int out, int groups) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= static_cast<int64_t>(out) * groups) return;
  const int row = static_cast<int>(i / groups), group = static_cast<int>(i % groups);
  to[(static_cast<int64_t>(row / kExpertTileRows) * groups + group) * kExpertTileRows +
     row % kExpertTileRows] = from[i];
}

}  // namespace

bool has_expert_tiles(CodeType codes, int group_size, int out, int in) {
  const bool four = codes == CodeType::kInt4 || codes == CodeType::kMxfp4;
  const bool power = group_size >= 32 && (group_size & (group_size - 1)) == 0;
  return codes != CodeType::kNone && power && in % group_size == 0 && in % (four ? 64 : 32) == 0 &&
         out % kExpertTileRows == 0;
}

cudaError_t tile_experts(void* weight, void* scale, void* spare, CodeType codes, int group_size,
                         int num_experts, int out, int in, cudaStream_t stream) {
  return dispatch_expert_code_type(codes, [&](auto constant) {
    constexpr CodeType kCodeType = constant.value;
    constexpr int64_t kScale = kCodeType == CodeType::kMxfp4 ? 1 : 4;
    const int groups = in / group_size;
    const int64_t bytes = static_cast<int64_t>(out) * in * kBits<kCodeType> / 8,
                  scales = static_cast<int64_t>(out) * groups;
    using S = std::conditional_t<kScale == 1, uint8_t, float>;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      char* own = static_cast<char*>(weight) + expert * bytes;
      cudaError_t error = cudaMemcpyAsync(spare, own, bytes, cudaMemcpyDeviceToDevice, stream);
      if (error == cudaSuccess)
        error =
            launch(tile_experts_kernel<kCodeType>,
                   ceil_div(static_cast<int64_t>(out) * in / 8, 256), 256, 0, stream,
                   reinterpret_cast<uint32_t*>(own), static_cast<const uint32_t*>(spare), out, in);
      S* own_scale = static_cast<S*>(scale) + expert * scales;
      if (error == cudaSuccess)
        error =
            cudaMemcpyAsync(spare, own_scale, scales * kScale, cudaMemcpyDeviceToDevice, stream);
      if (error == cudaSuccess)
        error = launch(tile_scales_kernel<S>, ceil_div(scales, 256), 256, 0, stream, own_scale,
                       static_cast<const S*>(spare), out, groups);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

}  // namespace llmc::kernels
