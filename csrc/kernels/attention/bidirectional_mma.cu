// Attention of packed tokens to all of their sequence by mma. See mma_attention.cuh.
#include "bidirectional.h"
#include "mma_attention.cuh"

namespace llmc::kernels {
namespace {

// Keys in the rows of the queries, perhaps with a window on both sides.
template <typename T>
struct PackedKeys {
  using Params = BidirectionalParams;
  using Element = T;

  __device__ PackedKeys(const Params& p, int sequence, int kv_head)
      : stride_(p.key_stride),
        window_(p.window),
        last_(p.cu_seqlens[sequence + 1] - p.cu_seqlens[sequence] - 1) {
    const int64_t begin =
        p.cu_seqlens[sequence] * stride_ + static_cast<int64_t>(kv_head) * p.head_dim;
    key = static_cast<const T*>(p.key) + begin;
    value = static_cast<const T*>(p.value) + begin;
  }
  static __device__ int start_of(const Params& p, int b) { return p.cu_seqlens[b]; }
  static __device__ const T* query(const Params& p, int row, int head) {
    return static_cast<const T*>(p.query) + row * p.query_stride +
           static_cast<int64_t>(head) * p.head_dim;
  }
  static __device__ const float* sinks(const Params&) { return nullptr; }
  static __device__ float out_scale_inverse(const Params&) { return 0; }
  __device__ int first_seen(int i) const { return window_ > 0 ? max(0, i - window_) : 0; }
  __device__ int last_seen(int i) const { return window_ > 0 ? min(last_, i + window_) : last_; }
  __device__ int64_t row(int j) const { return j * stride_; }

  static constexpr int past = 0;
  const T *key, *value;

 private:
  int64_t stride_;
  int window_, last_;  // last_: position of the sequence's last token
};

template <typename T>
cudaError_t dispatch_head_dim(const BidirectionalParams& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 32: return mma_attention::run<T, 32, PackedKeys<T>>(p, stream);
    case 64: return mma_attention::run<T, 64, PackedKeys<T>>(p, stream);
    case 128: return mma_attention::run<T, 128, PackedKeys<T>>(p, stream);
    case 256: return mma_attention::run<T, 256, PackedKeys<T>>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

bool has_bidirectional_mma(DType dtype, const BidirectionalParams& p) {
  return (dtype == DType::kFloat16 || dtype == DType::kBFloat16) && p.key_starts == nullptr &&
         p.distance_bias == nullptr && p.key_stride == p.value_stride &&
         (p.head_dim == 32 || p.head_dim == 64 || p.head_dim == 128 ||
          (p.head_dim == 256 &&
           mma_attention::kShared<256> <=
               device::device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>()));
}

cudaError_t bidirectional_mma(DType dtype, const BidirectionalParams& p, cudaStream_t stream) {
  return dtype == DType::kFloat16 ? dispatch_head_dim<__half>(p, stream)
                                  : dispatch_head_dim<__nv_bfloat16>(p, stream);
}

}  // namespace llmc::kernels
