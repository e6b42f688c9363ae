// The shared prefix of a step, which hosts pass to attention kernels.
#pragma once

#include <cstdint>

namespace llmc::kernels {

// Positions that several decoding sequences have in the same cache blocks, from position 0 on. The
// values are in device memory, so that one captured graph serves any prefix.
struct SharedPrefix {
  const int32_t*
      of;  // [2]: one of these sequences, and the number of shared positions; null: no prefix
  const int32_t* own_from;  // [batch]: the first position that a sequence attends to by itself; 0
                            // if it shares none
  float* results;           // prefix_scratch() bytes
};

}  // namespace llmc::kernels
