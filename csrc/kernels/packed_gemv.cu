// y = act(norm(x) · weightᵀ + bias) + residual for few rows of x, the weight in codes of 4 or 8 bits: gemv.cu with less to
// read and more to do.
//
// A step is 32 columns, a thread's 8 of rows g and g + 8 in a tile of 16: of 4 bits a word, of 8 bits two. Codes become
// exact numbers of 16 bits in registers (packed.cuh), in pairs of columns 4 apart, for which x is brought in the same
// order; the tensor core sums up a group of columns, and its scale multiplies that sum, in float32. So nothing is rounded
// but x and y. Where groups have minima, these multiply the sums of x's groups, which the tensor core makes of ones.
//
// A chunk is 256 bytes of each row, kStages of which are under way to shared memory all the time, past L1. Threads copy
// 16 bytes and read others' words, from places where no two rows share a bank. Reads out · in weights once, and a scale
// of 4 bytes per group (of 128 columns at 4 bits: 6 % more); writes y.
#include "gemv.cuh"
#include "packed.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kVectors = 4;  // of 16 bytes that a thread copies of a row in a chunk
constexpr int kStages = 3;   // chunks under way
constexpr int kRowBytes = kVectors * 4 * 16;

// What a row's group is multiplied with.
struct Group {
  float scale, minimum;
  uint32_t offset;
};

// kTiles: groups of 8 rows of x.
template <typename T, Codes kCodes, int kWarps, int kTiles>
__global__ void __launch_bounds__(kWarps * 32) packed_gemv_kernel(GemvParams p) {
  constexpr int kThreads = kWarps * 32, kBit = kBits<kCodes>, kChunk = kRowBytes * 8 / kBit, kPerVector = kBit == 4 ? 4 : 2;
  extern __shared__ uint4 ring[];  // [kStages][kVectors][2][kThreads]
  __shared__ float partial[kWarps][16][kTiles * 8 + 1];
  __shared__ float measured[kWarps][kTiles * 8][2];
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int height = p.gated ? 8 : 16, tiles = (p.out + height - 1) / height, chunks = chunks_of<kWarps, kChunk>(p.in);
  const int begin = warp * chunks * kChunk;
  const int64_t row_bytes = static_cast<int64_t>(p.in) * kBit / 8;
  // Where a thread's vector of a row goes: rows g and g + 2 would share banks.
  const int swizzle = kBit == 4 ? g / 2 % 4 : g / 2 % 2 * 2;
  // Rows beyond the last repeat it; their sums are not written.
  auto low_row = [&](int tile) { return min(tile * height + g, p.out - 1); };
  auto high_row = [&](int tile) { return p.gated ? p.out + low_row(tile) : min(tile * height + 8 + g, p.out - 1); };

  // The copies are ahead of the products: their own place in the sequence of tiles and chunks.
  struct {
    int tile, chunk, slot;
    const uint8_t *low, *high;
  } ahead{static_cast<int>(blockIdx.x), 0, 0, nullptr, nullptr};
  auto find_rows = [&] {
    const auto* codes = static_cast<const uint8_t*>(p.weight);
    ahead.low = codes + low_row(ahead.tile) * row_bytes;
    ahead.high = codes + high_row(ahead.tile) * row_bytes;
  };
  auto copy_chunk = [&] {
    if (ahead.tile < tiles) {
      const int64_t first = static_cast<int64_t>(begin) * kBit / 8 + ahead.chunk * kRowBytes + 16 * t;
      uint4* to = ring + ahead.slot * kVectors * 2 * kThreads + warp * 32 + g * 4 + (t ^ swizzle);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = first + 64 * v;
        const bool there = at < row_bytes;
        start_copy(to + 2 * v * kThreads, ahead.low + (there ? at : 0), there);
        start_copy(to + (2 * v + 1) * kThreads, ahead.high + (there ? at : 0), there);
      }
      ahead.slot = ahead.slot + 1 == kStages ? 0 : ahead.slot + 1;
      if (++ahead.chunk == chunks) {
        ahead.chunk = 0;
        ahead.tile += gridDim.x;
        find_rows();
      }
    }
    end_group();
  };
  find_rows();
  for (int i = 0; i < kStages; ++i) copy_chunk();  // weights do not depend on the kernel before

  const Packing& packing = p.packing;
  const int groups = p.in / packing.group_size, first_group = begin / packing.group_size;
  const bool has_minima = packing.minimum != nullptr;
  auto group_of = [&](int64_t row, int group) {
    Group found{};
    if (group >= groups) return found;
    found.scale = __ldg(packing.scale + row * groups + group);
    if (has_minima) found.minimum = __ldg(packing.minimum + row * groups + group);
    found.offset = offset_of<T, kCodes>(zero_of<kCodes>(packing, row, group, groups));
    return found;
  };
  Group next_low = group_of(low_row(blockIdx.x), first_group), next_high = group_of(high_row(blockIdx.x), first_group);
  wait_for_inputs();
  let_next_start();

  const T* x = static_cast<const T*>(p.x);
  const uint32_t one = pack<T>(1.f, 1.f), ones[4] = {one, one, one, one};
  int slot = 0, turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
    const int64_t low = low_row(tile), high = high_row(tile);
    float total[kTiles][4] = {}, sum[kTiles][4] = {}, of_group[kTiles][4] = {}, of_x[kTiles][2] = {};
    Group of_low = next_low, of_high = next_high;
    int group = first_group, left = (packing.group_size - begin % packing.group_size) / 32;  // steps of the group
    next_low = group_of(low, group + 1), next_high = group_of(high, group + 1);
    auto end_of_group = [&] {
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          total[n][c] = fmaf(sum[n][c], c < 2 ? of_low.scale : of_high.scale, total[n][c]);
          if (has_minima) total[n][c] = fmaf(of_group[n][c], c < 2 ? of_low.minimum : of_high.minimum, total[n][c]);
          sum[n][c] = of_group[n][c] = 0;
        }
    };
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int column = begin + chunk * kChunk + 8 * t;
      wait_for_group<kStages - 1>();
      __syncwarp();
      const uint4* from = ring + slot * kVectors * 2 * kThreads + warp * 32 + g * 4;
      slot = slot + 1 == kStages ? 0 : slot + 1;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        uint4 b[kPerVector][kTiles];
#pragma unroll
        for (int j = 0; j < kPerVector; ++j)
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const int row = n * 8 + g, at = column + (v * kPerVector + j) * 32;
            b[j][n] = row < p.rows && at < p.in ? *reinterpret_cast<const uint4*>(x + static_cast<int64_t>(row) * p.in + at)
                                                : make_uint4(0, 0, 0, 0);
            if (p.norm && turn == 0) measure<T>(of_x[n], b[j][n]);
          }
#pragma unroll
        for (int j = 0; j < kPerVector; ++j) {
          auto words = [&](int half) {
            const uint4* row = from + (2 * v + half) * kThreads;
            if constexpr (kBit == 4) return make_uint2(reinterpret_cast<const uint32_t*>(row + (j ^ swizzle))[t], 0);
            else return reinterpret_cast<const uint2*>(row + ((2 * j + t / 2) ^ swizzle))[t % 2];
          };
          uint32_t of_rows[2][4];
          numbers_of<T, kCodes>(of_rows[0], words(0), of_low.offset);
          numbers_of<T, kCodes>(of_rows[1], words(1), of_high.offset);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const uint4& natural = b[j][n];
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
              const uint32_t first = k == 0 ? natural.x : natural.y, second = k == 0 ? natural.z : natural.w;
              const uint32_t b0 = __byte_perm(first, second, 0x5410), b1 = __byte_perm(first, second, 0x7632);
              const uint32_t a[4] = {of_rows[0][k], of_rows[1][k], of_rows[0][k + 1], of_rows[1][k + 1]};
              multiply<T>(sum[n], a, b0, b1);
              if (has_minima) multiply<T>(of_group[n], ones, b0, b1);
            }
          }
          if (--left == 0) {
            end_of_group();
            ++group;
            left = packing.group_size / 32;
            of_low = next_low, of_high = next_high;
            next_low = group_of(low, group + 1), next_high = group_of(high, group + 1);
          }
        }
      }
      __syncwarp();  // the chunk has been read
      copy_chunk();
    }
    end_of_group();
    if (tile + gridDim.x < tiles) {
      next_low = group_of(low_row(tile + gridDim.x), first_group);
      next_high = group_of(high_row(tile + gridDim.x), first_group);
    }
    if (turn > 0) __syncthreads();  // partial may still be read
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = n * 8 + 2 * t;
      partial[warp][g][row] = total[n][0], partial[warp][g][row + 1] = total[n][1];
      partial[warp][g + 8][row] = total[n][2], partial[warp][g + 8][row + 1] = total[n][3];
      if (p.norm && turn == 0)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          of_x[n][k] += __shfl_xor_sync(~0u, of_x[n][k], 1);
          of_x[n][k] += __shfl_xor_sync(~0u, of_x[n][k], 2);
          if (t == 0) measured[warp][n * 8 + g][k] = of_x[n][k];
        }
    }
    __syncthreads();
    finish_tile<T>(p, partial, measured, tile, turn, p.gated ? Tile::kGated : Tile::kWide, p.norm);
  }
}

// As many blocks as are resident at once.
template <typename T, Codes kCodes, int kWarps, int kTiles>
cudaError_t run_tiles(const GemvParams& p, cudaStream_t stream) {
  constexpr size_t kShared = sizeof(uint4) * kStages * kVectors * 2 * kWarps * 32;
  auto kernel = packed_gemv_kernel<T, kCodes, kWarps, kTiles>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (error != cudaSuccess) return error;
  static const int resident = [kernel] {
    int blocks = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kWarps * 32, kShared);
    return std::max(blocks, 1) * static_cast<int>(multiprocessors());
  }();
  const int tiles = static_cast<int>(blocks_for(p.out, p.gated ? 8 : 16));
  return launch(kernel, std::min(tiles, resident), kWarps * 32, kShared, stream, p);
}

template <typename T, Codes kCodes, int kWarps>
cudaError_t run_warps(const GemvParams& p, cudaStream_t stream) {
  return p.rows > 8 ? run_tiles<T, kCodes, kWarps, 2>(p, stream) : run_tiles<T, kCodes, kWarps, 1>(p, stream);
}

template <typename T, Codes kCodes>
cudaError_t run_codes(const GemvParams& p, cudaStream_t stream) {
  constexpr int kRings = kStages * kVectors * 2 * 32 * sizeof(uint4) * 8, kSums = 12 << 10;
  const unsigned wanted = blocks_for(p.in, kRowBytes * 8 / kBits<kCodes>);
  if (wanted > 4 && device_property<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= kRings + kSums)
    return run_warps<T, kCodes, 8>(p, stream);
  return wanted > 2 ? run_warps<T, kCodes, 4>(p, stream) : run_warps<T, kCodes, 2>(p, stream);
}

template <typename T>
cudaError_t run_type(const GemvParams& p, cudaStream_t stream) {
  return with_codes(p.packing.codes, [&](auto codes) { return run_codes<T, codes.value>(p, stream); });
}

// Eight columns a thread.
template <typename T, Codes kCodes>
__global__ void __launch_bounds__(256) unpack_kernel(T* y, const uint8_t* weight, Packing packing, int out, int in) {
  wait_for_inputs();
  let_next_start();
  const int per_row = (in + 7) / 8;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x, row = at / per_row;
  if (row >= out) return;
  const int first = static_cast<int>(at % per_row) * 8;
  if (in % 8 == 0) {
    Vec<T, 8> numbers;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      numbers.data[i] = from_float<T>(number_at<kCodes>(packing, weight, row, first + i, in));
    store(y + row * in + first, numbers);
  } else {
    for (int column = first; column < min(first + 8, in); ++column)
      y[row * in + column] = from_float<T>(number_at<kCodes>(packing, weight, row, column, in));
  }
}

}  // namespace

cudaError_t packed_gemv(DType dtype, const GemvParams& p, cudaStream_t stream) {
  const int group = p.packing.group_size;
  if (p.rows > kGemvRows || p.in % 32 != 0 || group < 32 || group % 32 != 0 || p.in % group != 0)
    return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

cudaError_t unpack(DType dtype, void* y, const void* weight, const Packing& packing, int out, int in,
                   cudaStream_t stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return with_codes(packing.codes, [&](auto codes) {
      return launch(unpack_kernel<T, codes.value>, blocks_for(static_cast<int64_t>(out) * ((in + 7) / 8), 256), 256, 0,
                    stream, static_cast<T*>(y), static_cast<const uint8_t*>(weight), packing, out, in);
    });
  });
}

}  // namespace llmc::kernels
