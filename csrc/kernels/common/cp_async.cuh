// Asynchronous copies from global to shared memory (cp.async).
#pragma once

#include "device.cuh"

namespace llmc::device {

// Starts a copy of 16 bytes to shared memory that bypasses L1; writes zeros unless `there`. The L2
// prefetch size is 128 bytes: with 256 a weight takes 4 % longer to read, and longer still without
// a hint.
__device__ __forceinline__ void cp_async(uint4* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the kNewest newest groups of this thread are outstanding.
template <int kNewest>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

}  // namespace llmc::device
