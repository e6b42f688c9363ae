// Asynchronous copies from global to shared memory (cp.async).
#pragma once

#include "device.cuh"

namespace llmc::device {

// A copy of 16 bytes into shared memory, past L1, that goes on beside the thread; zeros where not `there`. The cache is to
// fetch 128 bytes: where it fetches 256 a weight takes 4 % longer, and where it is told nothing longer still.
__device__ __forceinline__ void cp_async(uint4* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

// The end of a group of copies into shared memory that go on beside the thread.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the newest kNewest groups of copies of this thread are there.
template <int kNewest>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(kNewest) : "memory");
}

}  // namespace llmc::device
