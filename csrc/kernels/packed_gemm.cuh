// What the GEMMs of packed weights share.
#pragma once

#include "packed.cuh"

namespace llmc::kernels {

// Stages of tiles, in the order of the tiles, which blocks share out evenly: a tile may be the work of several. Each of
// these leaves its sums in one of two places of its own, the second where it begins the tile.
struct Shares {
  int tiles, out_tiles, stages;  // stages of a tile; out_tiles of the same rows of x
  float* partial;                  // [blocks, 2, a tile]
  int32_t* counters;               // [blocks], that of the block which begins a tile is the tile's
  int unit = 1;                    // stages that stay together: one, or those of a tile
  int parts = 1;                   // with more, clusters of so many blocks, each of which shares out a tile

  __host__ __device__ int begin(int block, int blocks) const {
    if (parts > 1) return block / parts * stages + stages * (block % parts) / parts;
    return static_cast<int>(static_cast<int64_t>(tiles) * (stages / unit) * block / blocks) * unit;
  }
  // The block that has this stage of all.
  __device__ int owner(int stage, int blocks) const {
    int found = static_cast<int>(static_cast<int64_t>(stage) * blocks / (static_cast<int64_t>(tiles) * stages));
    while (begin(found + 1, blocks) <= stage) ++found;
    while (begin(found, blocks) > stage) --found;
    return found;
  }
};

// packed_gemm() by Hopper's own instructions, where packs_on_hopper().
bool packs_on_hopper(DType dtype, const GemvParams& p);
cudaError_t packed_gemm_on_hopper(DType dtype, const GemvParams& p, void* scratch, int32_t* counters, cudaStream_t stream);

}  // namespace llmc::kernels
