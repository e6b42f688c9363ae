// mbarriers, bulk copies (TMA without tensor maps) and thread block clusters. What needs Hopper
// compiles to nothing on other GPUs.
#pragma once

#include "device.cuh"

#if __CUDA_ARCH__ >= 900
#define SM90_ASM(...) asm volatile(__VA_ARGS__)
#else
#define SM90_ASM(...)
#endif

namespace llmc::device {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// An mbarrier, by its address in shared memory.
struct Mbarrier {
  uint32_t at;

  __device__ __forceinline__ void init(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() const {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(at)
                 : "memory");
  }
  // Arrives when this thread's outstanding cp.async copies have completed.
  __device__ __forceinline__ void arrive_after_cp_async() const {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
  }
  // Arrives, and makes the phase wait for `bytes` bytes of asynchronous copies.
  __device__ __forceinline__ void arrive_expect_tx(uint32_t bytes) const {
    SM90_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at),
             "r"(bytes) : "memory");
  }
  // Waits until the phase of this parity has completed.
  __device__ __forceinline__ void wait(uint32_t parity) const {
#if __CUDA_ARCH__ >= 900
#define WAIT_FOR_PHASE "try_wait"
#else
#define WAIT_FOR_PHASE "test_wait"
#endif
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier." WAIT_FOR_PHASE
        ".parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n}" ::"r"(at),
        "r"(parity)
        : "memory");
#undef WAIT_FOR_PHASE
  }
};

// Waits at named barrier `barrier` until `threads` threads have arrived.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Makes mbarrier.init of this thread visible to asynchronous copies and to other blocks of the
// cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  SM90_ASM("fence.mbarrier_init.release.cluster;" :: : "memory");
}

// Copies contiguous bytes from global to shared memory; `barrier` counts them. Addresses and size
// are multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t target, const void* from, uint32_t bytes,
                                          Mbarrier barrier) {
  SM90_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(from), "r"(bytes), "r"(barrier.at) : "memory");
}
// Makes this thread's writes to shared memory visible to the async proxy (wgmma, TMA).
__device__ __forceinline__ void fence_async_proxy() {
  SM90_ASM("fence.proxy.async.shared::cta;" :: : "memory");
}

// Blocks of the cluster, and the rank of this block.
__device__ __forceinline__ int cluster_size() {
  int size = 1;
  SM90_ASM("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
__device__ __forceinline__ int cluster_rank() {
  int rank = 0;
  SM90_ASM("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Index of the cluster in the grid.
__device__ __forceinline__ int cluster_id() {
  int place = 0;
  SM90_ASM("mov.u32 %0, %%clusterid.x;" : "=r"(place));
  return place;
}

// Cluster barrier. cluster_arrive() and cluster_wait() order memory (release, acquire);
// cluster_arrive_relaxed() does not.
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();
  SM90_ASM("barrier.cluster.arrive.release.aligned;" :: : "memory");
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
  __syncwarp();
  SM90_ASM("barrier.cluster.arrive.relaxed.aligned;" :: : "memory");
}
__device__ __forceinline__ void cluster_wait() {
  __syncwarp();
  SM90_ASM("barrier.cluster.wait.acquire.aligned;" :: : "memory");
}

// Loads four floats from block `rank`'s shared memory, at the offset of `from` in this block's.
__device__ __forceinline__ float4 ld_shared_cluster(const float* from, int rank) {
  float4 x{};
  SM90_ASM(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}" : "=f"(x.x),
      "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(smem_address(from)), "r"(rank) : "memory");
  return x;
}

// Stores x to block `rank`'s shared memory, at the offset of `to`; that block's barrier counts four
// bytes.
__device__ __forceinline__ void st_async(float* to, Mbarrier barrier, int rank, float x) {
  SM90_ASM(
      "{\n.reg .b32 there, counted;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 counted, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [counted];\n}" ::"r"(
          smem_address(to)),
      "r"(barrier.at), "r"(rank), "f"(x) : "memory");
}

}  // namespace llmc::device

#undef SM90_ASM
