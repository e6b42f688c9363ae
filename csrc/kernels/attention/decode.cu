// Decode attention of one new token per sequence; see decode_kernel.cuh.
#include "decode.cuh"

#include "decode_kernel.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

template <typename T, typename C, int kSteps, int kWarps>
cudaError_t run_warps(const AttentionParams& p, cudaStream_t stream) {
  return launch_decode<T, C, kSteps, kWarps, kDecodeHeads>(p, stream);
}

template <typename T, typename C, int kSteps, int kWarps>
bool fits() {
  return fits_decode<T, C, kSteps, kWarps, kDecodeHeads>();
}

// With few blocks, more warps each: latency dominates. With more blocks than fit at once, fewer
// warps; with many waves, one warp, so that the last blocks end together.
template <typename T, typename C, int kSteps>
cudaError_t run(const AttentionParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(decode_columns(p) * p.batch);
  if constexpr (kSteps <= 2)
    if (4 * blocks <= num_sms() && fits<T, C, kSteps, 12>())
      return run_warps<T, C, kSteps, 12>(p, stream);
  if (blocks <= num_sms() && fits<T, C, kSteps, 8>()) return run_warps<T, C, kSteps, 8>(p, stream);
  static const unsigned resident = resident_decode<T, C, kSteps, 4, kDecodeHeads>();
  if constexpr (kSteps <= 4)
    if (blocks > 2 * resident) return run_warps<T, C, kSteps, 1>(p, stream);
  if (blocks > resident) return run_warps<T, C, kSteps, 2>(p, stream);
  return run_warps<T, C, kSteps, 4>(p, stream);
}

template <typename T, typename C>
cudaError_t run_cache(const AttentionParams& p, cudaStream_t stream) {
  if (p.head_dim <= 64) return run<T, C, 2>(p, stream);  // few models have 32 or less
  if (p.head_dim <= 96) return run<T, C, 3>(p, stream);
  if (p.head_dim <= 128) return run<T, C, 4>(p, stream);
  if (p.head_dim <= 256) return run<T, C, 8>(p, stream);
  if constexpr (std::is_same_v<T, C>) return run_warps<T, C, 16, 4>(p, stream);
  return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t run_type(const AttentionParams& p, cudaStream_t stream) {
  return p.float8 ? run_cache<T, Float8>(p, stream) : run_cache<T, T>(p, stream);
}

}  // namespace

bool can_decode(DType dtype, const AttentionParams& p) {
  if (dtype == DType::kFloat32) return false;
  return p.head_dim <= 256 || (!p.float8 && fits<__half, __half, 16, 4>());
}

cudaError_t decode(DType dtype, const AttentionParams& p, cudaStream_t stream) {
  if (!p.splits_planned) {
    const cudaError_t error = plan_kv_splits(p, stream);
    if (error != cudaSuccess) return error;
  }
  if (rows_per_block(p) > 1) return decode_rows(dtype, p, stream);
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
