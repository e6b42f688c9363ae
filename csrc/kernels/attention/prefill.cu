// Prefill attention by mma, after append_kernel has rotated the queries and written the caches. See
// mma_attention.cuh.
#include "mma_attention.cuh"
#include "prefill.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

// Keys in the KV cache; causal, with a window or chunk, and with bidirectional ranges.
template <typename T, typename C>
struct CacheKeys {
  using Params = AttentionParams;
  using Element = C;

  __device__ CacheKeys(const Params& p, int sequence, int kv_head)
      : past(p.past_lens[sequence]),
        key(static_cast<const C*>(p.key_cache)),
        value(static_cast<const C*>(p.value_cache)),
        window_(p.window),
        chunk_(p.chunk),
        last_(past + device::start_of(p, sequence + 1) - device::start_of(p, sequence) - 1),
        windowed_ranges_(p.windowed_ranges),
        ranges_(range_of(p, device::start_of(p, sequence))),
        rows_(p, sequence, kv_head) {}
  static __device__ int start_of(const Params& p, int b) { return device::start_of(p, b); }
  static __device__ const T* query(const Params& p, int row, int head) {
    return static_cast<const T*>(p.queries) +
           (static_cast<int64_t>(row) * p.num_heads + head) * p.head_dim;
  }
  static __device__ const float* sinks(const Params& p) { return p.sinks; }
  static __device__ float out_scale_inverse(const Params& p) { return p.out_scale_inverse; }
  __device__ int first_seen(int i) const {
    return first_visible(window_, chunk_, range(i), windowed_ranges_, i);
  }
  __device__ int last_seen(int i) const { return last_visible(range(i), i); }
  __device__ int64_t row(int j) const { return rows_(j); }

  const int past;
  const C *const key, *const value;

 private:
  // That of the query at position i; there may be none after the sequence's last one.
  __device__ const int32_t* range(int i) const {
    return ranges_ == nullptr || i > last_ ? nullptr : ranges_ + 2 * (i - past);
  }

  const int window_, chunk_, last_;
  const bool windowed_ranges_;
  const int32_t* const ranges_;  // of the sequence's first query
  const CacheRows rows_;
};

template <typename T, typename C>
cudaError_t dispatch_head_dim(const AttentionParams& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 64: return mma_attention::run<T, 64, CacheKeys<T, C>>(p, stream);
    case 80: return mma_attention::run<T, 80, CacheKeys<T, C>>(p, stream);
    case 96: return mma_attention::run<T, 96, CacheKeys<T, C>>(p, stream);
    case 128: return mma_attention::run<T, 128, CacheKeys<T, C>>(p, stream);
    case 256: return mma_attention::run<T, 256, CacheKeys<T, C>>(p, stream);
    case 512: return mma_attention::run<T, 512, CacheKeys<T, C>>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <typename T>
cudaError_t dispatch_cache(const AttentionParams& p, cudaStream_t stream) {
  return p.float8 ? dispatch_head_dim<T, Float8>(p, stream) : dispatch_head_dim<T, T>(p, stream);
}

}  // namespace

bool can_prefill(DType dtype, int head_dim) {
  return (dtype == DType::kFloat16 || dtype == DType::kBFloat16) &&
         (head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 ||
          head_dim == 256 ||
          (head_dim == 512 && mma_attention::kShared<512> <=
                                  device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>()));
}

cudaError_t prefill(DType dtype, const AttentionParams& p, cudaStream_t stream) {
  return dtype == DType::kFloat16 ? dispatch_cache<__half>(p, stream)
                                  : dispatch_cache<__nv_bfloat16>(p, stream);
}

}  // namespace llmc::kernels
