// LoRA adapters of requests, many in one step.
//
// Few rows: a block of shrink_rows reads x and one or four rows of `down`, so a row's adapter is
// read once by many blocks. It does not need the layer's own GEMM, which is the kernel before it,
// and so runs beside it (PDL). A thread of expand_rows makes one output (gated: a gate and its up)
// from a row of `up`, the first of whose vectors it reads before the previous kernel has ended. It
// also applies the activation, since the GEMM cannot.
//
// Many rows: plan_tiles sorts rows by slot, in tiles of rows of one adapter. A block of
// shrink_tiles multiplies a tile by 32 rows of `down`, its warps split K, and so do blocks if tiles
// are few, as in decode steps; a warp of expand_tiles makes 32 outputs of a tile. Both read 16-byte
// vectors as mma fragments, with the same permutation of K in both operands: four lanes cover 64
// bytes of a row.
#include "../common/mma.cuh"
#include "../common/output_writer.cuh"
#include "lora.h"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kThreads = 128, kWarps = kThreads / 32;

// Ranks that a slot uses.
__device__ __forceinline__ int used_ranks(const LoraParams& p, int slot) {
  return p.ranks[p.experts > 1 ? slot % (p.slots / p.experts) : slot];
}
// The matrix of `up` of a slot.
__device__ __forceinline__ int up_of(const LoraParams& p, int slot) {
  if (p.experts <= 1) return slot;
  const int adapters = p.slots / p.experts;
  return slot % adapters * p.experts + slot / adapters;
}
__device__ __forceinline__ int x_row_of(const LoraParams& p, int row) {
  return p.x_rows != nullptr ? p.x_rows[row] : row;
}
__device__ __forceinline__ int z_row_of(const LoraParams& p, int row) {
  return p.z_rows != nullptr ? p.z_rows[row] : row;
}

// Sums of a block over the columns of x: products with rows of `down`, those without x, those of
// the shift, and moments of x.
template <int kRanks>
struct ShrinkSums {
  float dot[kRanks], flat[kRanks], shift[kRanks], total, squares;
};

template <typename T, int kWidth, int kRanks, bool kNorm>
__global__ void __launch_bounds__(kThreads) shrink_rows_kernel(LoraParams p) {
  __shared__ float partial[kWarps];
  if (p.waits) pdl_wait();
  else pdl_launch_dependents();  // the expansion waits for the end of this grid
  const int row = blockIdx.y, tiles = p.rank / kRanks;
  const int part = blockIdx.x / tiles, first = blockIdx.x % tiles * kRanks, slot = p.ids[row];
  if (slot >= 0 && first < used_ranks(p, slot)) {
    const T* x = static_cast<const T*>(p.x) + static_cast<int64_t>(x_row_of(p, row)) * p.in;
    const T* down = static_cast<const T*>(p.down) +
                    ((static_cast<int64_t>(part) * p.slots + slot) * p.rank + first) * p.in;
    ShrinkSums<kRanks> sums{};
#pragma unroll 4
    for (int k = threadIdx.x * kWidth; k < p.in; k += kThreads * kWidth) {
      Vec<T, kWidth> rows[kRanks];
#pragma unroll
      for (int r = 0; r < kRanks; ++r)
        rows[r] = load<T, kWidth>(down + static_cast<int64_t>(r) * p.in + k);
      const auto values = load<T, kWidth>(x + k);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float value = to_float(values.data[i]);
        const float gain = kNorm && p.gain != nullptr ? p.gain[k + i] : 1.f;
        const float shift = kNorm && p.shift != nullptr ? p.shift[k + i] : 0.f;
        if (kNorm) sums.total += value, sums.squares = fmaf(value, value, sums.squares);
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
          const float weight = to_float(rows[r].data[i]);
          sums.dot[r] = fmaf(weight * gain, value, sums.dot[r]);
          if (kNorm) {
            sums.flat[r] = fmaf(weight, gain, sums.flat[r]);
            sums.shift[r] = fmaf(weight, shift, sums.shift[r]);
          }
        }
      }
    }
    float mean = 0, scale = p.row_scale != nullptr ? p.row_scale[row] : 1.f;
    if (kNorm) {
      const float squares = block_sum<kThreads>(sums.squares, partial) / p.in;
      if (p.centred) mean = block_sum<kThreads>(sums.total, partial) / p.in;
      scale = rsqrtf(fmaxf(squares - mean * mean, 0.f) + p.epsilon);
    }
    float* hidden = p.hidden + (static_cast<int64_t>(row) * p.parts + part) * p.rank + first;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const float one = scale * (sums.dot[r] - mean * sums.flat[r]) + sums.shift[r];
      const float whole = block_sum<kThreads>(one, partial);
      if (threadIdx.x == 0) hidden[r] = whole;
    }
  }
  if (p.waits) pdl_launch_dependents();
  else pdl_wait();  // so that the end of this grid is that of the GEMM, too
}

template <typename T, int kHalves>
__global__ void __launch_bounds__(kThreads) expand_rows_kernel(LoraParams p) {
  constexpr int kWidth = kVec<T>, kAhead = 16 / kWidth;
  extern __shared__ float hidden[];  // [parts * rank]
  const int row = blockIdx.y, width = p.out / kHalves;
  const int column = blockIdx.x * kThreads + threadIdx.x, slot = p.ids[row];
  const int used = slot < 0 ? 0 : used_ranks(p, slot);
  const T* up[kHalves];
  const float* own[kHalves];
  Vec<T, kWidth> ahead[kHalves][kAhead];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int output = min(column, width - 1) + half * width;
    const int part = p.part == nullptr ? 0 : min(max(p.part[output], 0), p.parts - 1);
    own[half] = hidden + part * p.rank;
    up[half] = static_cast<const T*>(p.up) +
               (static_cast<int64_t>(up_of(p, max(slot, 0))) * p.out + output) * p.rank;
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (i * kWidth < used) ahead[half][i] = load<T, kWidth>(up[half] + i * kWidth);
  }
  pdl_wait();
  pdl_launch_dependents();
  if (used == 0 && p.y == p.z && p.activation == Activation::kNone) return;
  if (used > 0)
    for (int i = threadIdx.x; i < p.parts * p.rank; i += kThreads)
      hidden[i] = p.hidden[static_cast<int64_t>(row) * p.parts * p.rank + i];
  __syncthreads();
  if (column >= width) return;
  const int z_row = z_row_of(p, row);
  float sum[kHalves];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    sum[half] = 0;
    auto add = [&](const Vec<T, kWidth>& weights, int from) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        sum[half] = fmaf(to_float(weights.data[i]), own[half][from + i], sum[half]);
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (i * kWidth < used) add(ahead[half][i], i * kWidth);
#pragma unroll 4
    for (int k = kAhead * kWidth; k < used; k += kWidth) add(load<T, kWidth>(up[half] + k), k);
    sum[half] += to_float(
        static_cast<const T*>(p.z)[static_cast<int64_t>(z_row) * p.out + column + half * width]);
  }
  float value = activate(sum[0], p.activation);
  if constexpr (kHalves == 2) value *= sum[1];
  OutputWriter<T>(p.y, p.y_scale_inverse)
      .write(static_cast<int64_t>(z_row) * width + column, value);
}

// One block. Shared memory: rows of each slot, then the next place of each.
constexpr int kPlanThreads = 1024;
__global__ void __launch_bounds__(kPlanThreads)
    plan_tiles_kernel(const int32_t* ids, int rows, int slots, int32_t* order, LoraTile* tiles,
                      int num_tiles) {
  extern __shared__ int counts[];
  int* next = counts + slots;
  for (int s = threadIdx.x; s < slots; s += kPlanThreads) counts[s] = 0;
  pdl_wait();
  pdl_launch_dependents();
  __syncthreads();
  for (int r = threadIdx.x; r < rows; r += kPlanThreads)
    if (ids[r] >= 0) atomicAdd(&counts[ids[r]], 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    int first = 0, tile = 0;
    for (int s = 0; s < slots; ++s) {
      next[s] = first;
      for (int done = 0; done < counts[s]; done += kLoraTileRows)
        tiles[tile++] = {s, first + done, min(counts[s] - done, kLoraTileRows)};
      first += counts[s];
    }
    for (; tile < num_tiles; ++tile) tiles[tile] = {0, 0, 0};
  }
  __syncthreads();
  for (int r = threadIdx.x; r < rows; r += kPlanThreads)
    if (ids[r] >= 0) order[atomicAdd(&next[ids[r]], 1)] = r;
}

constexpr int kTileM = kLoraTileRows / 16,
              kTileN = 4;  // mma tiles of rows, and of ranks or outputs

// c += a * b^T for 32 columns of both. a has the lane's vectors of rows g and g + 8 of each tile of
// 16, b those of row g of each tile of 8.
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[kTileM][kTileN][4], const uint4 (&a)[kTileM][2],
                                         const uint4 (&b)[kTileN]) {
#pragma unroll
  for (int m = 0; m < kTileM; ++m) {
    const uint32_t even[4] = {a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y};
    const uint32_t odd[4] = {a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w};
#pragma unroll
    for (int n = 0; n < kTileN; ++n) {
      mma_m16n8k16<T>(c[m][n], even, b[n].x, b[n].y);
      mma_m16n8k16<T>(c[m][n], odd, b[n].z, b[n].w);
    }
  }
}

constexpr int kShrinkWarps = 8;
template <typename T>
__global__ void __launch_bounds__(kShrinkWarps * 32) shrink_tiles_kernel(LoraParams p) {
  constexpr int kRanks = 8 * kTileN, kStep = kShrinkWarps * 32;  // columns
  __shared__ float partial[kShrinkWarps][kLoraTileRows][kRanks + 1];
  pdl_wait();
  pdl_launch_dependents();
  const LoraTile tile = p.tiles[blockIdx.x];
  const int chunks = (p.rank + kRanks - 1) / kRanks;
  const int part = blockIdx.y / chunks, first = blockIdx.y % chunks * kRanks;
  if (tile.count == 0 || first >= used_ranks(p, tile.slot)) return;
  const int used = min(used_ranks(p, tile.slot) - first, kRanks);
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int32_t* order = p.order + tile.first;
  const T* x[kTileM][2];
#pragma unroll
  for (int m = 0; m < kTileM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m * 16 + h * 8 + g;
      x[m][h] = row < tile.count ? static_cast<const T*>(p.x) +
                                       static_cast<int64_t>(x_row_of(p, order[row])) * p.in
                                 : nullptr;
    }
  const T* down = static_cast<const T*>(p.down) +
                  ((static_cast<int64_t>(part) * p.slots + tile.slot) * p.rank + first + g) * p.in;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const int splits = static_cast<int>(gridDim.z);
  const int share = (p.in + splits * kStep - 1) / (splits * kStep) * kStep;
  const int begin = blockIdx.z * share, end = min(begin + share, p.in);
  float sum[kTileM][kTileN][4] = {};
#pragma unroll 4
  for (int at = begin + warp * 32; at < end; at += kStep) {
    const int k = at + 8 * t;
    const bool there = k < end;
    uint4 a[kTileM][2], b[kTileN];
#pragma unroll
    for (int n = 0; n < kTileN; ++n)
      b[n] = there && n * 8 < used
                 ? *reinterpret_cast<const uint4*>(down + static_cast<int64_t>(n) * 8 * p.in + k)
                 : zero;
#pragma unroll
    for (int m = 0; m < kTileM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        a[m][h] = there && x[m][h] != nullptr ? *reinterpret_cast<const uint4*>(x[m][h] + k) : zero;
    multiply<T>(sum, a, b);
  }
#pragma unroll
  for (int m = 0; m < kTileM; ++m)
#pragma unroll
    for (int n = 0; n < kTileN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        partial[warp][m * 16 + i / 2 * 8 + g][n * 8 + 2 * t + i % 2] = sum[m][n][i];
  __syncthreads();
  float* hidden = p.hidden + static_cast<int64_t>(blockIdx.z) * p.rows * p.parts * p.rank;
  for (int i = threadIdx.x; i < tile.count * used; i += kShrinkWarps * 32) {
    const int row = i / used, r = i % used;
    float whole = 0;
#pragma unroll
    for (int w = 0; w < kShrinkWarps; ++w) whole += partial[w][row][r];
    if (p.row_scale != nullptr) whole *= p.row_scale[order[row]];
    hidden[(static_cast<int64_t>(order[row]) * p.parts + part) * p.rank + first + r] = whole;
  }
}

// Eight sums of float32 values of each split, as T.
template <typename T>
__device__ __forceinline__ uint4 sum8(const float* from, int splits, int64_t stride) {
  float sums[8] = {};
  for (int split = 0; split < splits; ++split, from += stride) {
    const auto low = load<float, 4>(from), high = load<float, 4>(from + 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += low.data[i], sums[4 + i] += high.data[i];
  }
  return {pack2<T>(sums[0], sums[1]), pack2<T>(sums[2], sums[3]), pack2<T>(sums[4], sums[5]),
          pack2<T>(sums[6], sums[7])};
}

template <typename T>
__global__ void __launch_bounds__(kThreads) expand_tiles_kernel(LoraParams p, int splits) {
  pdl_wait();
  pdl_launch_dependents();
  const LoraTile tile = p.tiles[blockIdx.x];
  const int used = tile.count == 0 ? 0 : used_ranks(p, tile.slot);
  if (used == 0) return;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int begin = blockIdx.y * 32 * kWarps + threadIdx.x / 32 * 32;
  const int32_t* order = p.order + tile.first;
  int part = begin + lane < p.out ? 0 : -1;
  if (part == 0 && p.part != nullptr) part = min(max(p.part[begin + lane], 0), p.parts - 1);
  const float* hidden[kTileM][2];
#pragma unroll
  for (int m = 0; m < kTileM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m * 16 + h * 8 + g;
      hidden[m][h] = row < tile.count
                         ? p.hidden + static_cast<int64_t>(order[row]) * p.parts * p.rank
                         : nullptr;
    }
  const T* up = static_cast<const T*>(p.up) +
                (static_cast<int64_t>(up_of(p, tile.slot)) * p.out + begin + g) * p.rank;
  const int64_t stride = static_cast<int64_t>(p.rows) * p.parts * p.rank;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  float sum[kTileM][kTileN][4] = {};
  for (uint32_t left = __ballot_sync(~0u, part >= 0); left != 0;) {  // each part of the columns
    const int which = __shfl_sync(~0u, part, __ffs(left) - 1);
    const uint32_t columns = __ballot_sync(~0u, part == which);
    left &= ~columns;
    for (int k = 8 * t; k - 8 * t < used; k += 32) {
      const bool there = k < used;
      uint4 a[kTileM][2], b[kTileN];  // b has no other columns
#pragma unroll
      for (int n = 0; n < kTileN; ++n)
        b[n] = there && (columns >> (n * 8 + g) & 1) != 0
                   ? *reinterpret_cast<const uint4*>(up + static_cast<int64_t>(n) * 8 * p.rank + k)
                   : zero;
#pragma unroll
      for (int m = 0; m < kTileM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          a[m][h] = there && hidden[m][h] != nullptr
                        ? sum8<T>(hidden[m][h] + which * p.rank + k, splits, stride)
                        : zero;
      multiply<T>(sum, a, b);
    }
  }
#pragma unroll
  for (int m = 0; m < kTileM; ++m)
#pragma unroll
    for (int n = 0; n < kTileN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = m * 16 + i / 2 * 8 + g, column = begin + n * 8 + 2 * t + i % 2;
        if (row >= tile.count || column >= p.out) continue;
        T& z = static_cast<T*>(p.z)[static_cast<int64_t>(z_row_of(p, order[row])) * p.out + column];
        z = from_float<T>(to_float(z) + sum[m][n][i]);
      }
}

template <typename T, int kWidth, int kRanks>
cudaError_t shrink(const LoraParams& p, cudaStream_t stream) {
  auto kernel = p.norm ? shrink_rows_kernel<T, kWidth, kRanks, true>
                       : shrink_rows_kernel<T, kWidth, kRanks, false>;
  return launch(kernel, dim3(p.parts * p.rank / kRanks, p.rows), kThreads, 0, stream, p);
}

// Calls f with a null pointer to the 16-bit type of a dtype.
template <typename F>
cudaError_t dispatch_16_bits(DType dtype, F&& f) {
  if (dtype == DType::kFloat16) return f(static_cast<__half*>(nullptr));
  if (dtype == DType::kBFloat16) return f(static_cast<__nv_bfloat16*>(nullptr));
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t lora_shrink_rows(DType dtype, const LoraParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (p.in % kVec<T> != 0) return shrink<T, 1, 4>(p, stream);
    // Four rows of `down` share their x, as long as that leaves blocks for all SMs.
    const bool many = static_cast<int64_t>(p.rows) * p.parts * p.rank >= 8ll * num_sms();
    return many ? shrink<T, kVec<T>, 4>(p, stream) : shrink<T, kVec<T>, 1>(p, stream);
  });
}

cudaError_t lora_expand_rows(DType dtype, const LoraParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto kernel = p.gated ? expand_rows_kernel<T, 2> : expand_rows_kernel<T, 1>;
    const dim3 grid(ceil_div(p.gated ? p.out / 2 : p.out, kThreads), p.rows);
    return launch(kernel, grid, kThreads, sizeof(float) * p.parts * p.rank, stream, p);
  });
}

cudaError_t plan_lora_tiles(const int32_t* ids, int rows, int slots, int32_t* order,
                            LoraTile* tiles, cudaStream_t stream) {
  return launch(plan_tiles_kernel, 1, kPlanThreads, 2 * sizeof(int) * slots, stream, ids, rows,
                slots, order, tiles, lora_tiles(rows, slots));
}

cudaError_t lora_shrink_tiles(DType dtype, const LoraParams& p, cudaStream_t stream) {
  return dispatch_16_bits(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const dim3 grid(lora_tiles(p.rows, p.slots), p.parts * ceil_div(p.rank, 8 * kTileN),
                    lora_splits(p.rows, p.in));
    return launch(shrink_tiles_kernel<T>, grid, kShrinkWarps * 32, 0, stream, p);
  });
}

cudaError_t lora_expand_tiles(DType dtype, const LoraParams& p, cudaStream_t stream) {
  return dispatch_16_bits(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const dim3 grid(lora_tiles(p.rows, p.slots), ceil_div(p.out, 32 * kWarps));
    return launch(expand_tiles_kernel<T>, grid, kThreads, 0, stream, p, lora_splits(p.rows, p.in));
  });
}

}  // namespace llmc::kernels
