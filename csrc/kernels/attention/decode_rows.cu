// Decode attention of several rows of one sequence, its new tokens with drafts; see
// decode_kernel.cuh.
#include "decode.cuh"
#include "decode_kernel.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

template <typename T, typename C, int kSteps>
cudaError_t run(const AttentionParams& p, cudaStream_t stream) {
  const int rows = rows_per_block(p), batch = (p.batch + rows - 1) / rows;
  const auto blocks = static_cast<unsigned>(decode_columns(p) * batch);
  if (blocks <= num_sms() && fits_decode<T, C, kSteps, 8, kRowHeads>())
    return launch_decode<T, C, kSteps, 8, kRowHeads>(p, stream);
  static const unsigned resident = resident_decode<T, C, kSteps, 4, kRowHeads>();
  if (blocks > resident) return launch_decode<T, C, kSteps, 2, kRowHeads>(p, stream);
  return launch_decode<T, C, kSteps, 4, kRowHeads>(p, stream);
}

template <typename T, typename C>
cudaError_t run_cache(const AttentionParams& p, cudaStream_t stream) {
  if (p.head_dim <= 64) return run<T, C, 2>(p, stream);
  if (p.head_dim <= 128) return run<T, C, 4>(p, stream);
  return run<T, C, 8>(p, stream);
}

template <typename T>
cudaError_t run_type(const AttentionParams& p, cudaStream_t stream) {
  return p.float8 ? run_cache<T, Float8>(p, stream) : run_cache<T, T>(p, stream);
}

}  // namespace

cudaError_t decode_rows(DType dtype, const AttentionParams& p, cudaStream_t stream) {
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
