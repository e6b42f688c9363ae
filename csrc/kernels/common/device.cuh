// Device code for all kernels: 16-byte vectors, conversions, reductions, activations, programmatic
// dependent launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <algorithm>

#include "dtype.h"

namespace llmc::device {

template <typename T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  return static_cast<T>(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// FP8 of KV caches and quantized activations. It has no infinities: conversions saturate at 448.
using Float8 = __nv_fp8_e4m3;

// N elements that are loaded and stored by one instruction.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T data[N];
};

template <typename T>
constexpr int kVec = 16 / sizeof(T);

// Whether the address is a multiple of `multiple` bytes.
inline bool is_aligned(const void* from, uintptr_t multiple) {
  return reinterpret_cast<uintptr_t>(from) % multiple == 0;
}

// Whether rows `pitch` elements apart can be read by vectors of kWidth elements.
template <typename T, int kWidth = kVec<T>>
bool has_aligned_rows(const void* rows, int64_t pitch) {
  return pitch % kWidth == 0 && is_aligned(rows, kWidth * sizeof(T));
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <typename T, int N>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// Prefetches the cache line of p to L1.
__device__ __forceinline__ void prefetch_l1(const void* p) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
}

// Eight cache elements as 32-bit words. Conditional loads keep words: for narrower elements, or
// converted ones, the compiler would assemble registers after each load and so serialize the loads.
template <typename C>
using Cached = Vec<uint32_t, sizeof(C) * 8 / 4>;

template <typename C>
__device__ __forceinline__ Cached<C> load_cache(const C* p) {
  return load<uint32_t, sizeof(C) * 8 / 4>(reinterpret_cast<const uint32_t*>(p));
}

// Converts the elements to T, exactly.
template <typename T, typename C>
__device__ __forceinline__ Vec<T, 8> convert_cache(const Cached<C>& words) {
  if constexpr (std::is_same_v<T, C>) {
    return *reinterpret_cast<const Vec<T, 8>*>(&words);
  } else {
    const auto* pairs = reinterpret_cast<const __nv_fp8x2_storage_t*>(&words);
    Vec<T, 8> wide;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const __half2 pair = __nv_cvt_fp8x2_to_halfraw2(pairs[i / 2], __NV_E4M3);
      if constexpr (std::is_same_v<T, __half>) {
        wide.data[i] = pair.x, wide.data[i + 1] = pair.y;
      } else {
        wide.data[i] = from_float<T>(to_float(pair.x)),
        wide.data[i + 1] = from_float<T>(to_float(pair.y));
      }
    }
    return wide;
  }
}
template <typename T, int N>
__device__ __forceinline__ void store_floats(T* p, const float (&x)[N]) {
  Vec<T, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) v.data[i] = from_float<T>(x[i]);
  store(p, v);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

// Inclusive prefix sum over a warp.
template <typename Number>
__device__ __forceinline__ Number warp_scan(Number x) {
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const Number other = __shfl_up_sync(~0u, x, step);
    if (threadIdx.x % 32 >= step) x += other;
  }
  return x;
}

// Sum over a block of kThreads threads, returned to every thread. `partial` is shared memory, one
// float per warp.
template <int kThreads>
__device__ __forceinline__ float block_sum(float x, float* partial) {
  static_assert(kThreads % 32 == 0);
  x = warp_sum(x);
  if constexpr (kThreads == 32) return x;
  __syncthreads();  // partial may still be read by the previous call
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) total += partial[w];
  return total;
}

// Sum of x and maximum of y, which is not negative, over a block.
template <int kThreads>
__device__ __forceinline__ float2 block_sum_and_max(float x, float y, float2* partial) {
  float2 both{warp_sum(x), __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(y)))};
  if constexpr (kThreads == 32) return both;
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = both;
  __syncthreads();
  both = {0, 0};
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w)
    both = {both.x + partial[w].x, fmaxf(both.y, partial[w].y)};
  return both;
}

constexpr float kLog2E = 1.44269504f;

// A logit and its token as one sortable integer: larger for larger logits, and for smaller tokens
// among equal logits (0 equals -0). Never 0, which can stand for no token.
__device__ __forceinline__ uint64_t rank_of(float logit, int token) {
  const uint32_t bits = __float_as_uint(logit == 0 ? 0.f : logit);
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(token);
}
__device__ __forceinline__ float logit_of(uint64_t rank) {
  const auto ordered = static_cast<uint32_t>(rank >> 32);
  return __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}
__device__ __forceinline__ int token_of(uint64_t rank) {
  return static_cast<int>(~static_cast<uint32_t>(rank));
}

// Maximum over a warp, returned to every lane.
__device__ __forceinline__ uint64_t warp_max(uint64_t x) {
  const auto high = static_cast<uint32_t>(x >> 32), most = __reduce_max_sync(~0u, high);
  const uint32_t low = __reduce_max_sync(~0u, high == most ? static_cast<uint32_t>(x) : 0u);
  return static_cast<uint64_t>(most) << 32 | low;
}

__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.f) + log1pf(__expf(-fabsf(x)));
}

__device__ __forceinline__ float activate(float x, Activation kind) {
  switch (kind) {
    case Activation::kNone: return x;
    case Activation::kRelu: return fmaxf(x, 0.f);
    case Activation::kRelu2: return fmaxf(x, 0.f) * fmaxf(x, 0.f);
    case Activation::kGelu: return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
    case Activation::kGeluTanh:
      return 0.5f * x * (1.f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case Activation::kSilu: return __fdividef(x, 1.f + __expf(-x));
    case Activation::kQuickGelu: return x / (1.f + __expf(-1.702f * x));
    case Activation::kTanh: return tanhf(x);
    case Activation::kSigmoid: return 1.f / (1.f + __expf(-x));
    case Activation::kSoftplus: return softplus(x);
  }
  return x;
}

template <Activation kKind, int N>
__device__ __forceinline__ void activate_as(float (&x)[N]) {
#pragma unroll
  for (float& one : x) one = activate(one, kKind);
}

// The same for N values with one branch for all. The most frequent activations are tested first,
// without the jump table of a switch.
template <int N>
__device__ __forceinline__ void activate(float (&x)[N], Activation kind) {
  if (kind == Activation::kNone) return;
  if (kind == Activation::kSilu) return activate_as<Activation::kSilu>(x);
  switch (kind) {
    case Activation::kNone:
    case Activation::kSilu: return;
    case Activation::kRelu: return activate_as<Activation::kRelu>(x);
    case Activation::kRelu2: return activate_as<Activation::kRelu2>(x);
    case Activation::kGelu: return activate_as<Activation::kGelu>(x);
    case Activation::kGeluTanh: return activate_as<Activation::kGeluTanh>(x);
    case Activation::kQuickGelu: return activate_as<Activation::kQuickGelu>(x);
    case Activation::kTanh: return activate_as<Activation::kTanh>(x);
    case Activation::kSigmoid: return activate_as<Activation::kSigmoid>(x);
    case Activation::kSoftplus: return activate_as<Activation::kSoftplus>(x);
  }
}

// Programmatic dependent launch (PDL): a kernel may start while its predecessor runs. Every kernel
// calls pdl_wait() and then pdl_launch_dependents(), so when a kernel starts, all but its direct
// predecessor have completed. A kernel may read what the predecessor writes, and write what it
// reads, only after pdl_wait(). It may read weights and results of older kernels before.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// An attribute of the device that is current at the first call. All devices of a process are alike.
template <cudaDeviceAttr kAttribute>
int device_attribute() {
  static const int value = [] {
    int device = 0, found = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&found, kAttribute, device);
    return found;
  }();
  return value;
}
inline bool supports_pdl() { return device_attribute<cudaDevAttrComputeCapabilityMajor>() >= 9; }
inline unsigned num_sms() {
  return static_cast<unsigned>(device_attribute<cudaDevAttrMultiProcessorCount>());
}
// Maximum number of resident blocks of a kernel on the current device; at least one per SM.
template <typename Kernel>
int resident_blocks(Kernel kernel, int threads, size_t shared) {
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared);
  return std::max(blocks, 1) * static_cast<int>(num_sms());
}

// Launch configuration with PDL where the device supports it, and with clusters of `cluster`
// blocks.
class Launch {
 public:
  Launch(dim3 grid, dim3 block, size_t shared, cudaStream_t stream, unsigned cluster = 1) {
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.dynamicSmemBytes = shared;
    config_.stream = stream;
    config_.attrs = attributes_;
    if (supports_pdl()) {
      attributes_[config_.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes_[config_.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
      attributes_[config_.numAttrs].id = cudaLaunchAttributeClusterDimension;
      auto& dimensions = attributes_[config_.numAttrs++].val.clusterDim;
      dimensions.x = cluster, dimensions.y = 1, dimensions.z = 1;
    }
  }
  Launch(const Launch&) = delete;
  const cudaLaunchConfig_t* config() const { return &config_; }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attributes_[2]{};
};

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared,
                   cudaStream_t stream, Args&&... args) {
  return cudaLaunchKernelEx(Launch(grid, block, shared, stream).config(), kernel,
                            static_cast<Params>(args)...);
}

// Calls f with a null pointer to the C++ type of a floating-point DType.
template <typename F>
cudaError_t dispatch_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32: return f(static_cast<float*>(nullptr));
    case DType::kFloat16: return f(static_cast<__half*>(nullptr));
    case DType::kBFloat16: return f(static_cast<__nv_bfloat16*>(nullptr));
    default: return cudaErrorInvalidValue;
  }
}

// Calls f with null pointers to T and to the cache's element type.
template <typename F>
cudaError_t dispatch_cache_dtype(DType dtype, bool float8, F&& f) {
  return dispatch_dtype(dtype, [&](auto* type) {
    return float8 ? f(type, static_cast<Float8*>(nullptr)) : f(type, type);
  });
}

inline unsigned ceil_div(int64_t count, int per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

}  // namespace llmc::device
