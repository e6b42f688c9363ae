// Stream-K schedule of the GEMMs with quantized weights.
#pragma once

#include "../common/dequantize.cuh"
#include "params.h"

namespace llmc::kernels {

// All stages of all tiles in tile order, divided evenly among blocks. Several blocks may share a
// tile; each has two slots for partial sums, the second for the tile that it begins.
struct StreamKSchedule {
  int tiles, out_tiles, stages;  // stages: of a tile; out_tiles: tiles of the same rows of x
  float* partial;                // [blocks, 2, tile]
  int32_t* counters;             // [blocks]; a tile uses that of the block that begins it
  int unit = 1;                  // stages that are not divided: one, or those of a tile
  int cluster_size = 1;          // blocks of a cluster, which shares a tile

  // 32 bits suffice for a weight of 10^10 elements.
  __host__ __device__ uint32_t begin(uint32_t block, uint32_t blocks) const {
    if (cluster_size > 1)
      return block / cluster_size * stages + stages * (block % cluster_size) / cluster_size;
    return (unit == 1 ? tiles * stages : tiles) * block / blocks * unit;
  }
  // The block that has stage `stage` of all.
  __device__ int owner(int stage, int blocks) const {
    int found = static_cast<uint32_t>(stage) * blocks / static_cast<uint32_t>(tiles * stages);
    while (static_cast<int>(begin(found + 1, blocks)) <= stage) ++found;
    while (static_cast<int>(begin(found, blocks)) > stage) --found;
    return found;
  }
};

// wgmma version of packed_gemm(), where has_packed_gemm_sm90(); for more than 256 rows only where
// has_large_packed_gemm_sm90().
bool has_packed_gemm_sm90(DType dtype, const GemvParams& p);
bool has_large_packed_gemm_sm90(const GemvParams& p);
cudaError_t packed_gemm_sm90(DType dtype, const GemvParams& p, void* scratch, int32_t* counters,
                             cudaStream_t stream);

}  // namespace llmc::kernels
