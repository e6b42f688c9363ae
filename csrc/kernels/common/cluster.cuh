// What blocks share: barriers in shared memory that count what arrives; and on Hopper copies that are counted there, and clusters,
// whose blocks reach one another's shared memory. On other GPUs these compile to nothing.
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

// A barrier in shared memory, by its address.
struct Mbarrier {
  uint32_t at;

  __device__ __forceinline__ void init(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() const {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(at) : "memory");
  }
  // Arrive once this thread's copies of 16 bytes are there.
  __device__ __forceinline__ void arrive_after_cp_async() const {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
  }
  // Arrive, and let the phase wait for so many bytes of copies too.
  __device__ __forceinline__ void arrive_expect_tx(uint32_t bytes) const {
    SM90_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
  }
  // Until the phase of this parity has ended.
  __device__ __forceinline__ void wait(uint32_t parity) const {
#if __CUDA_ARCH__ >= 900
#define WAIT_FOR_PHASE "try_wait"
#else
#define WAIT_FOR_PHASE "test_wait"
#endif
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier." WAIT_FOR_PHASE ".parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n}" ::"r"(at), "r"(parity) : "memory");
#undef WAIT_FOR_PHASE
  }
};

// A barrier of a block's, by its number: until so many threads are here.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// What this thread has initialised, for copies and for other blocks that meet it.
__device__ __forceinline__ void fence_mbarrier_init() {
  SM90_ASM("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Bytes that lie side by side to shared memory, of which the barrier counts them; addresses and counts are multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t target, const void* from, uint32_t bytes, Mbarrier barrier) {
  SM90_ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
             ::"r"(target), "l"(from), "r"(bytes), "r"(barrier.at) : "memory");
}
// What this thread has written to shared memory, for the tensor core to see, and for copies to overwrite.
__device__ __forceinline__ void fence_async_proxy() { SM90_ASM("fence.proxy.async.shared::cta;" ::: "memory"); }

// Of a cluster: how many blocks it has, and which this one is.
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
// Which of all clusters this one is.
__device__ __forceinline__ int cluster_id() {
  int place = 0;
  SM90_ASM("mov.u32 %0, %%clusterid.x;" : "=r"(place));
  return place;
}

// All threads of all its blocks arrive, and wait until all have. What they wrote before is there then; `cluster_arrive_relaxed` says
// nothing of memory.
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();
  SM90_ASM("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
  __syncwarp();
  SM90_ASM("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  __syncwarp();
  SM90_ASM("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Four numbers that block `rank` has where this one has `from`, in shared memory.
__device__ __forceinline__ float4 ld_shared_cluster(const float* from, int rank) {
  float4 x{};
  SM90_ASM("{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
             "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
             : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(smem_address(from)), "r"(rank) : "memory");
  return x;
}

// x to where block `rank` has what this one has at `to`, in shared memory; that block's barrier counts four bytes.
__device__ __forceinline__ void st_async(float* to, Mbarrier barrier, int rank, float x) {
  SM90_ASM("{\n.reg .b32 there, counted;\n"
             "mapa.shared::cluster.u32 there, %0, %2;\n"
             "mapa.shared::cluster.u32 counted, %1, %2;\n"
             "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [counted];\n}"
             ::"r"(smem_address(to)), "r"(barrier.at), "r"(rank), "f"(x) : "memory");
}

}  // namespace llmc::device

#undef SM90_ASM
