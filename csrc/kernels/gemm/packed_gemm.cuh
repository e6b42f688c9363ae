// What the GEMMs of packed weights share.
#pragma once

#include "../common/dequantize.cuh"
#include "params.h"

namespace llmc::kernels {

// Stages of tiles, in the order of the tiles, which blocks share out evenly: a tile may be the work of several. Each of
// these leaves its sums in one of two places of its own, the second where it begins the tile.
struct StreamKSchedule {
  int tiles, out_tiles, stages;  // stages of a tile; out_tiles of the same rows of x
  float* partial;                  // [blocks, 2, a tile]
  int32_t* counters;               // [blocks], that of the block which begins a tile is the tile's
  int unit = 1;                    // stages that stay together: one, or those of a tile
  int cluster_size = 1;                   // with more, clusters of so many blocks, each of which schedule out a tile

  // 32 bits are enough for a weight of 10^10 numbers.
  __host__ __device__ uint32_t begin(uint32_t block, uint32_t blocks) const {
    if (cluster_size > 1) return block / cluster_size * stages + stages * (block % cluster_size) / cluster_size;
    return (unit == 1 ? tiles * stages : tiles) * block / blocks * unit;
  }
  // The block that has this stage of all.
  __device__ int owner(int stage, int blocks) const {
    int found = static_cast<uint32_t>(stage) * blocks / static_cast<uint32_t>(tiles * stages);
    while (static_cast<int>(begin(found + 1, blocks)) <= stage) ++found;
    while (static_cast<int>(begin(found, blocks)) > stage) --found;
    return found;
  }
};

// packed_gemm() by Hopper's own instructions, where has_packed_gemm_sm90(); of more rows than 256 where has_large_packed_gemm_sm90() too.
bool has_packed_gemm_sm90(DType dtype, const GemvParams& p);
bool has_large_packed_gemm_sm90(const GemvParams& p);
cudaError_t packed_gemm_sm90(DType dtype, const GemvParams& p, void* scratch, int32_t* counters, cudaStream_t stream);

}  // namespace llmc::kernels
