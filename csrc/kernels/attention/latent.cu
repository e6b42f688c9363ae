// Multi-head latent attention (MLA): all heads attend to one row per position, a rotary part and a
// latent.
//
//   rope_kernel              rotates queries and new rows; appends rows to the cache
//   up_projection_kernel     queries * key_up per head: a query becomes as long as a row
//   mla_kernel               attention by mma, 16 bits, rows of 64 + 512; mla_fallback_kernel: any
//   merge_mla_splits_kernel  merges KV splits
//   up_projection_kernel     attended latents * value_up per head
//
// A pair is one head of one token; pairs are ordered by token. A block of mla_kernel takes 16, 32
// or 64 pairs of one sequence and one KV split, 64 positions at a time: 73,728 bytes are in flight
// to shared memory while the previous 64 positions are multiplied. A row is read once for scores
// and once as the value from shared memory, and once from L2 per block. Warps split scores by pairs
// and keys, and sums by columns.
#include "../common/cp_async.cuh"
#include "../common/mma.cuh"
#include "attention.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kDim = 576, kLatent = 512, kFirst = kDim - kLatent;  // of mla_kernel
constexpr int kKeys = 64, kWarps = 8, kChunks = kDim / 8;          // chunks of 16 bytes

// Index of a position's row in the cache, with or without a block table.
struct LatentRows {
  __device__ LatentRows(const LatentAttentionParams& p, int sequence) {
    if (p.block_table == nullptr) {
      first = static_cast<int64_t>(sequence) * p.max_seq_len;
    } else {
      shift = __ffs(p.block_size) - 1;
      table = p.block_table + sequence * static_cast<int64_t>(p.max_seq_len >> shift);
    }
  }
  __device__ __forceinline__ int64_t operator()(int position) const {
    if (table == nullptr) return first + position;
    return (static_cast<int64_t>(__ldg(table + (position >> shift))) << shift) +
           (position & ((1 << shift) - 1));
  }

  const int32_t* table = nullptr;
  int64_t first = 0;
  int shift = 0;
};

template <typename T>
__global__ void __launch_bounds__(256) rope_kernel(LatentAttentionParams p, T* queries) {
  pdl_wait();
  pdl_launch_dependents();
  const int token = blockIdx.x, lane = threadIdx.x % 32, dim = p.shared_dim + p.latent,
            half = p.rotary_dim / 2;
  const int sequence = sequence_of(p.cu_seqlens, p.batch, token);
  const int position = p.past_lens[sequence] + token - p.cu_seqlens[sequence];
  const float* cos = p.cos + static_cast<int64_t>(position) * half;
  const float* sin = p.sin + static_cast<int64_t>(position) * half;
  const int64_t row = LatentRows(p, sequence)(position);
  for (int head = threadIdx.x / 32; head <= p.num_heads; head += blockDim.x / 32) {
    const bool is_row = head == p.num_heads;
    const int64_t pair = static_cast<int64_t>(token) * p.num_heads + head;
    const T* from = is_row ? static_cast<const T*>(p.rows) + static_cast<int64_t>(token) * dim
                           : static_cast<const T*>(p.query) + pair * p.query_dim;
    T* to = is_row ? static_cast<T*>(p.cache) + row * dim : queries + pair * dim;
    for (int i = lane; i < half; i += 32) {
      const int a = p.interleaved ? 2 * i : i, b = p.interleaved ? 2 * i + 1 : i + half;
      const float first = to_float(from[a]), second = to_float(from[b]);
      to[a] = from_float<T>(first * cos[i] - second * sin[i]);
      to[b] = from_float<T>(second * cos[i] + first * sin[i]);
    }
    for (int i = 2 * half + lane; i < (is_row ? dim : p.shared_dim); i += 32) to[i] = from[i];
  }
}

// c[t, h, n] = sum over k of a[t, h, k] * b[h, k, n], with the strides of tokens and heads.
template <typename T>
struct UpProjection {
  const T *a, *b;
  T* c;
  int tokens, inner, columns;
  int64_t a_token, a_head, c_token, c_head;
};

// A block takes 8 tokens of a head and 32 * kEach columns. Each warp reads some rows of b once for
// them.
template <typename T, int kEach>
__global__ void __launch_bounds__(kWarps * 32) up_projection_kernel(UpProjection<T> p) {
  constexpr int kTokens = 8, kColumns = 32 * kEach;
  __shared__ float sums[kWarps][kTokens][kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.x, column = blockIdx.y * kColumns + lane * kEach,
            first = blockIdx.z * kTokens;
  const T* b = p.b + static_cast<int64_t>(head) * p.inner * p.columns + column;
  const T* a = p.a + first * p.a_token + head * p.a_head;
  const int tokens = min(kTokens, p.tokens - first);
  pdl_wait();
  pdl_launch_dependents();
  float sum[kTokens][kEach] = {};
#pragma unroll 4
  for (int k = warp; k < p.inner; k += kWarps) {
    Vec<T, kEach> row{};
    if (column < p.columns) row = load<T, kEach>(b + static_cast<int64_t>(k) * p.columns);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float x = t < tokens ? to_float(a[t * p.a_token + k]) : 0.f;
#pragma unroll
      for (int e = 0; e < kEach; ++e) sum[t][e] += x * to_float(row.data[e]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t)
#pragma unroll
    for (int e = 0; e < kEach; ++e) sums[warp][t][lane * kEach + e] = sum[t][e];
  __syncthreads();
  for (int at = threadIdx.x; at < tokens * kColumns; at += kWarps * 32) {
    const int t = at / kColumns, n = at % kColumns, to = blockIdx.y * kColumns + n;
    if (to >= p.columns) continue;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += sums[w][t][n];
    p.c[(first + t) * p.c_token + head * p.c_head + to] = from_float<T>(total);
  }
}

// By mma for many tokens: 64 tokens by 64 columns of a head, 32 of K at a time. Sizes and strides
// are multiples of 8.
template <typename T>
__global__ void __launch_bounds__(128) up_projection_mma_kernel(UpProjection<T> p) {
  constexpr int kTile = 64, kInner = 32, kPitchA = kInner + 8, kPitchB = kTile + 8;
  __shared__ alignas(16) T a_of[2][kTile][kPitchA];
  __shared__ alignas(16) T b_of[2][kInner][kPitchB];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.x, column = blockIdx.y * kTile, first = blockIdx.z * kTile;
  const T* a = p.a + head * p.a_head;
  const T* b = p.b + static_cast<int64_t>(head) * p.inner * p.columns;
  pdl_wait();
  pdl_launch_dependents();
  auto start = [&](T* to, const T* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(there ? 16 : 0)
                 : "memory");
  };
  auto copy = [&](int step) {
    const int k = step * kInner;
    if (k < p.inner) {
      for (int i = threadIdx.x; i < kTile * kInner / 8; i += 128) {
        const int row = i / (kInner / 8), at = i % (kInner / 8) * 8;
        const bool there = first + row < p.tokens && k + at < p.inner;
        start(&a_of[step % 2][row][at], there ? a + (first + row) * p.a_token + k + at : p.a,
              there);
      }
      for (int i = threadIdx.x; i < kTile * kInner / 8; i += 128) {
        const int row = i / (kTile / 8), at = i % (kTile / 8) * 8;
        const bool there = k + row < p.inner && column + at < p.columns;
        start(&b_of[step % 2][row][at],
              there ? b + static_cast<int64_t>(k + row) * p.columns + column + at : p.b, there);
      }
    }
    cp_async_commit();
  };
  float sum[8][4] = {};
  copy(0);
  for (int step = 0; step * kInner < p.inner; ++step) {
    copy(step + 1);
    cp_async_wait<1>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kInner; k += 16) {
      uint32_t left[4];
      ldmatrix_x4<false>(left, &a_of[step % 2][warp * 16 + lane % 16][k + lane / 16 * 8]);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t right[4];
        ldmatrix_x4<true>(right, &b_of[step % 2][k + lane % 16][n * 16 + lane / 16 * 8]);
        mma_m16n8k16<T>(sum[2 * n], left, right[0], right[1]);
        mma_m16n8k16<T>(sum[2 * n + 1], left, right[2], right[3]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = first + warp * 16 + lane / 4 + 8 * r, to = column + n * 8 + lane % 4 * 2;
      if (token < p.tokens && to < p.columns)
        *reinterpret_cast<uint32_t*>(p.c + token * p.c_token + head * p.c_head + to) =
            pack2<T>(sum[n][2 * r], sum[n][2 * r + 1]);
    }
}

// The pairs of one sequence that a block takes, and their positions.
struct Tile {
  int sequence, first, pairs;  // `first` among all pairs
  int start;                   // the sequence's first pair
  int past, to;                // positions [0, to) are visible to the last pair
};

// Tile number `number`, of up to kPairs pairs; 0 pairs: no such tile. Call from whole warps.
template <int kPairs>
__device__ __forceinline__ Tile tile_of(const LatentAttentionParams& p, int number) {
  const int heads = p.num_heads;
  Tile tile{};
  if (heads % kPairs == 0) {
    const int token = number * kPairs / heads;
    tile.sequence = sequence_of(p.cu_seqlens, p.batch, token);
    tile.first = number * kPairs;
    tile.pairs = kPairs;
  } else {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int base = 0; base < p.batch && tile.pairs == 0; base += 32) {
      const int sequence = base + lane;
      const int begin = sequence < p.batch ? p.cu_seqlens[sequence] : 0;
      const int pairs = sequence < p.batch ? (p.cu_seqlens[sequence + 1] - begin) * heads : 0;
      const int stop = warp_scan((pairs + kPairs - 1) / kPairs);
      const unsigned found = __ballot_sync(~0u, before + stop > number);
      if (found != 0) {
        const int which = __ffs(found) - 1;
        const int of_it = __shfl_sync(~0u, pairs, which),
                  its_start = __shfl_sync(~0u, begin, which);
        const int skipped = before + (which > 0 ? __shfl_sync(~0u, stop, max(which - 1, 0)) : 0);
        const int offset = (number - skipped) * kPairs;
        tile.sequence = base + which;
        tile.first = its_start * heads + offset;
        tile.pairs = min(kPairs, of_it - offset);
      }
      before += __shfl_sync(~0u, stop, 31);
    }
    if (tile.pairs == 0) return tile;
  }
  tile.start = p.cu_seqlens[tile.sequence] * heads;
  tile.past = p.past_lens[tile.sequence];
  tile.to = tile.past + (tile.first + tile.pairs - 1 - tile.start) / heads + 1;
  return tile;
}

// KV splits of a tile, and steps of kKeys per split.
__device__ __forceinline__ int2 splits_of(int positions, int parts) {
  const int steps = (positions + kKeys - 1) / kKeys, each = (steps + parts - 1) / parts;
  return {(steps + each - 1) / each, each};
}

// Partial results per tile and split: sums [kPairs, kLatent], then maxima and totals [kPairs, 2].
struct Results {
  float *sums, *ends;
};

template <int kTiles>
constexpr size_t kSharedBytes = 16 * (16 * kTiles + 2 * kKeys) * kChunks + 2 * 16 * kTiles * kKeys +
                                sizeof(float) * (2 * 128 + 16 * kTiles);

// kTiles: tiles of 16 pairs.
template <typename T, int kTiles>
__global__ void __launch_bounds__(kWarps * 32, 1)
    mla_kernel(LatentAttentionParams p, const T* queries, T* seen, Results results, int parts) {
  constexpr int kPairs = 16 * kTiles, kSplit = kWarps / kTiles;
  extern __shared__ uint4 raw[];
  uint4* query_of = raw;                              // [kPairs][kChunks]
  uint4* rows_of = query_of + kPairs * kChunks;       // [2][kKeys][kChunks]
  uint4* weights_of = rows_of + 2 * kKeys * kChunks;  // [kPairs][kKeys / 8]
  float* peaks_of = reinterpret_cast<float*>(weights_of + kPairs * kKeys / 8);  // [kSplit][kPairs]
  float* totals_of = peaks_of + 128;                                            // [kSplit][kPairs]
  float* factor_of = totals_of + 128;                                           // [kPairs]
  // Swizzle: eight rows that are read at once share no banks.
  auto at = [](int row, int chunk) { return row * kChunks + (chunk ^ (row & 7)); };
  pdl_wait();
  pdl_launch_dependents();
  const Tile tile = tile_of<kPairs>(p, blockIdx.x);
  if (tile.pairs == 0) return;
  const int2 division = splits_of(tile.to, parts);
  const int part = blockIdx.y;
  if (part >= division.x) return;
  const int from = part * division.y * kKeys, to = min(tile.to, from + division.y * kKeys);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const LatentRows row_of(p, tile.sequence);
  const T* cache = static_cast<const T*>(p.cache);
  auto cp_async = [](uint4* into, const void* source, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(into))),
                 "l"(source), "r"(there ? 16 : 0)
                 : "memory");
  };
  // Eight threads per row; zeros after the last one.
  auto copy = [&](int step) {
    const int start = from + step * kKeys;
    if (start < to) {
      uint4* into = rows_of + step % 2 * kKeys * kChunks;
#pragma unroll
      for (int r = 0; r < kKeys / 32; ++r) {
        const int row = threadIdx.x / 8 + 32 * r;
        const bool there = start + row < to;
        const T* source = cache + (there ? row_of(start + row) * kDim : 0);
#pragma unroll
        for (int c = 0; c < kChunks / 8; ++c) {
          const int chunk = 8 * c + threadIdx.x % 8;
          cp_async(into + at(row, chunk), source + 8 * chunk, there);
        }
      }
    }
    cp_async_commit();
  };
  for (int i = threadIdx.x; i < kPairs * kChunks; i += kWarps * 32) {
    const int pair = i / kChunks, chunk = i % kChunks;
    const bool there = pair < tile.pairs;
    cp_async(query_of + at(pair, chunk),
             queries + (there ? static_cast<int64_t>(tile.first + pair) : 0) * kDim + 8 * chunk,
             there);
  }
  copy(0);

  // Of scores: a tile of pairs, and 8 * kTiles keys. Rows g and g + 8 see positions up to `last`.
  const int own = warp % kTiles * 16, keys = warp / kTiles * 8 * kTiles;
  int last[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    last[r] =
        tile.past +
        (min(tile.first + own + g + 8 * r, tile.first + tile.pairs - 1) - tile.start) / p.num_heads;
  const float scale = p.scale * kLog2E;
  float peak[2] = {-INFINITY, -INFINITY}, total[2] = {};
  float sum[kTiles][8][4] = {};  // of all pairs, columns from 64 * warp on
  for (int step = 0, start = from; start < to; ++step, start += kKeys) {
    cp_async_wait<0>();
    __syncthreads();
    copy(step + 1);
    const uint4* rows = rows_of + step % 2 * kKeys * kChunks;
    float score[kTiles][4] = {};
#pragma unroll 6
    for (int k = 0; k < kDim / 32; ++k) {
      uint32_t left[2][4];
      ldmatrix_x4<false>(left[0], query_of + at(own + lane % 16, 4 * k + lane / 16));
      ldmatrix_x4<false>(left[1], query_of + at(own + lane % 16, 4 * k + 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        uint32_t right[4];
        ldmatrix_x4<false>(right, rows + at(keys + 8 * j + lane % 8, 4 * k + lane / 8));
        mma_m16n8k16<T>(score[j], left[0], right[0], right[1]);
        mma_m16n8k16<T>(score[j], left[1], right[2], right[3]);
      }
    }
    float higher[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int key = start + keys + 8 * j + 2 * t + c % 2;
        score[j][c] = key <= last[c / 2] && key < to ? score[j][c] * scale : -INFINITY;
        higher[c / 2] = fmaxf(higher[c / 2], score[j][c]);
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      higher[r] = fmaxf(higher[r], __shfl_xor_sync(~0u, higher[r], 1));
      higher[r] = fmaxf(higher[r], __shfl_xor_sync(~0u, higher[r], 2));
      if (t == 0) peaks_of[warp / kTiles * kPairs + own + g + 8 * r] = higher[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int pair = own + g + 8 * r;
      higher[r] = peak[r];
#pragma unroll
      for (int w = 0; w < kSplit; ++w) higher[r] = fmaxf(higher[r], peaks_of[w * kPairs + pair]);
      const float base = higher[r] == -INFINITY ? 0.f : higher[r], factor = exp2f(peak[r] - base);
      peak[r] = higher[r];
      if (t == 0 && warp < kTiles) factor_of[pair] = factor;
      total[r] *= factor;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const float first = exp2f(score[j][2 * r] - base),
                    second = exp2f(score[j][2 * r + 1] - base);
        total[r] += first + second;
        auto* words = reinterpret_cast<uint32_t*>(weights_of + pair * (kKeys / 8) +
                                                  ((keys / 8 + j) ^ (pair & 7)));
        words[t] = pack2<T>(first, second);
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const float upper = factor_of[16 * m + g], lower = factor_of[16 * m + g + 8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        sum[m][n][0] *= upper, sum[m][n][1] *= upper;
        sum[m][n][2] *= lower, sum[m][n][3] *= lower;
      }
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t left[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const int pair = 16 * m + lane % 16;
        ldmatrix_x4<false>(left[m],
                           weights_of + pair * (kKeys / 8) + ((2 * k + lane / 16) ^ (pair & 7)));
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t right[4];
        ldmatrix_x4<true>(right,
                          rows + at(16 * k + lane % 16, kFirst / 8 + 8 * warp + 2 * n + lane / 16));
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma_m16n8k16<T>(sum[m][2 * n], left[m], right[0], right[1]);
          mma_m16n8k16<T>(sum[m][2 * n + 1], left[m], right[2], right[3]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
    const int pair = own + g + 8 * r;
    if (t == 0) totals_of[warp / kTiles * kPairs + pair] = total[r];
    if (t == 0) peaks_of[warp / kTiles * kPairs + pair] = peak[r];
  }
  __syncthreads();
  const int64_t result = (static_cast<int64_t>(blockIdx.x) * parts + part) * kPairs;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int pair = 16 * m + g + 8 * r;
      if (pair >= tile.pairs) continue;
      float all = 0;
#pragma unroll
      for (int w = 0; w < kSplit; ++w) all += totals_of[w * kPairs + pair];
      const int64_t place = tile.first + pair;
      if (parts > 1 && warp == 0 && t == 0) {
        results.ends[2 * (result + pair)] = peaks_of[pair];
        results.ends[2 * (result + pair) + 1] = all;
      }
      const float share =
          1 / (all + sink_weight(p.sinks, static_cast<int>(place % p.num_heads), peaks_of[pair]));
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int column = 64 * warp + 8 * n + 2 * t;
        const float first = sum[m][n][2 * r], second = sum[m][n][2 * r + 1];
        if (parts > 1)
          *reinterpret_cast<float2*>(results.sums + (result + pair) * kLatent + column) = {first,
                                                                                           second};
        else
          *reinterpret_cast<uint32_t*>(seen + place * kLatent + column) =
              pack2<T>(first * share, second * share);
      }
    }
}

// One block per pair of a tile. Reads the partial results of its splits, writes kLatent elements.
template <typename T, int kPairs>
__global__ void __launch_bounds__(kLatent / 4)
    merge_mla_splits_kernel(LatentAttentionParams p, T* seen, Results results, int parts) {
  pdl_wait();
  pdl_launch_dependents();
  const Tile tile = tile_of<kPairs>(p, blockIdx.x);
  const int pair = blockIdx.y, column = 4 * threadIdx.x;
  if (pair >= tile.pairs) return;
  const int used = splits_of(tile.to, parts).x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * parts * kPairs + pair;
  float peak = -INFINITY, total = 0, sum[4] = {};
  for (int part = 0; part < used; ++part)
    peak = fmaxf(peak, results.ends[2 * (first + part * kPairs)]);
#pragma unroll 4
  for (int part = 0; part < used; ++part) {
    const float share = exp2f(results.ends[2 * (first + part * kPairs)] - peak);
    total += results.ends[2 * (first + part * kPairs) + 1] * share;
    const float4 own =
        *reinterpret_cast<const float4*>(results.sums + (first + part * kPairs) * kLatent + column);
    sum[0] += own.x * share, sum[1] += own.y * share, sum[2] += own.z * share,
        sum[3] += own.w * share;
  }
  const int64_t place = tile.first + pair;
  total += sink_weight(p.sinks, static_cast<int>(place % p.num_heads), peak);
#pragma unroll
  for (float& each : sum) each /= total;
  store_floats(seen + place * kLatent + column, sum);
}

// Any dtype and size: one block per pair, whose warps take every kFallbackWarps-th position.
constexpr int kFallbackWarps = 4;
template <typename T>
__global__ void __launch_bounds__(kFallbackWarps * 32)
    mla_fallback_kernel(LatentAttentionParams p, const T* queries, T* seen) {
  extern __shared__ float numbers[];
  __shared__ float peak_of[kFallbackWarps], total_of[kFallbackWarps];
  const int dim = p.shared_dim + p.latent, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* query = numbers;
  float* sums = numbers + dim + warp * p.latent;
  pdl_wait();
  pdl_launch_dependents();
  const int64_t pair = blockIdx.x;
  const int head = static_cast<int>(pair % p.num_heads),
            token = static_cast<int>(pair / p.num_heads);
  const int sequence = sequence_of(p.cu_seqlens, p.batch, token);
  const int last = p.past_lens[sequence] + token - p.cu_seqlens[sequence];
  const LatentRows row_of(p, sequence);
  for (int i = threadIdx.x; i < dim; i += kFallbackWarps * 32)
    query[i] = to_float(queries[pair * dim + i]);
  for (int i = lane; i < p.latent; i += 32) sums[i] = 0;
  __syncthreads();
  float peak = -INFINITY, total = 0;
  for (int position = warp; position <= last; position += kFallbackWarps) {
    const T* row = static_cast<const T*>(p.cache) + row_of(position) * dim;
    float score = 0;
    for (int i = lane; i < dim; i += 32) score += query[i] * to_float(row[i]);
    score = warp_sum(score) * p.scale * kLog2E;
    const float higher = fmaxf(peak, score), factor = exp2f(peak - higher),
                weight = exp2f(score - higher);
    for (int i = lane; i < p.latent; i += 32)
      sums[i] = sums[i] * factor + weight * to_float(row[p.shared_dim + i]);
    total = total * factor + weight;
    peak = higher;
  }
  if (lane == 0) peak_of[warp] = peak, total_of[warp] = total;
  __syncthreads();
  float higher = -INFINITY, all = 0;
  for (int w = 0; w < kFallbackWarps; ++w) higher = fmaxf(higher, peak_of[w]);
  for (int w = 0; w < kFallbackWarps; ++w) all += total_of[w] * exp2f(peak_of[w] - higher);
  all += sink_weight(p.sinks, head, higher);
  for (int i = threadIdx.x; i < p.latent; i += kFallbackWarps * 32) {
    float sum = 0;
    for (int w = 0; w < kFallbackWarps; ++w)
      sum += numbers[dim + w * p.latent + i] * exp2f(peak_of[w] - higher);
    seen[pair * p.latent + i] = from_float<T>(sum / all);
  }
}

constexpr int kMaxSplitBlocks = 132;  // of mla_kernel with split KV: one per SM

// Offsets in scratch: rotated queries [pairs, dim], attended latents [pairs, latent], partial
// results.
struct Scratch {
  int64_t seen, results, bytes;
};
int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }
Scratch scratch_of(DType dtype, int64_t pairs, int dim, int latent) {
  const int64_t element = dtype == DType::kFloat32 ? 4 : 2;
  const int64_t seen = aligned(pairs * dim * element),
                results = seen + aligned(pairs * latent * element);
  const bool divides = element == 2 && dim == kDim && latent == kLatent;
  return {seen, results,
          results + (divides ? int64_t{kMaxSplitBlocks} * 64 * (kLatent + 2) * 4 : 0)};
}

template <typename T>
cudaError_t run_up(const UpProjection<T>& p, int heads, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    const bool whole = p.inner % 8 == 0 && p.columns % 8 == 0 && p.a_token % 8 == 0 &&
                       p.a_head % 8 == 0 && p.c_token % 2 == 0 && p.c_head % 2 == 0 &&
                       is_aligned(p.a, 16) && is_aligned(p.b, 16) && is_aligned(p.c, 4);
    if (whole && p.tokens > 8)
      return launch(up_projection_mma_kernel<T>,
                    dim3(heads, ceil_div(p.columns, 64), ceil_div(p.tokens, 64)), 128, 0, stream,
                    p);
  }
  constexpr int kEach = sizeof(T) == 2 ? 4 : 2;
  const unsigned tokens = ceil_div(p.tokens, 8);
  if (p.columns % kEach == 0 && is_aligned(p.b, sizeof(T) * kEach))
    return launch(up_projection_kernel<T, kEach>,
                  dim3(heads, ceil_div(p.columns, 32 * kEach), tokens), kWarps * 32, 0, stream, p);
  return launch(up_projection_kernel<T, 1>, dim3(heads, ceil_div(p.columns, 32), tokens),
                kWarps * 32, 0, stream, p);
}

template <typename T, int kTiles>
cudaError_t run_tiles(const LatentAttentionParams& p, const T* queries, T* seen, float* results,
                      cudaStream_t stream) {
  constexpr int kPairs = 16 * kTiles;
  const int64_t pairs = static_cast<int64_t>(p.num_tokens) * p.num_heads;
  const int tiles =
      static_cast<int>((pairs + kPairs - 1) / kPairs) + (p.num_heads % kPairs == 0 ? 0 : p.batch);
  const int parts =
      std::max(1, std::min(kMaxSplitBlocks / tiles, (p.max_seq_len + kKeys - 1) / kKeys));
  const Results made{results, results + static_cast<int64_t>(tiles) * parts * kPairs * kLatent};
  auto kernel = mla_kernel<T, kTiles>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes<kTiles>));
  if (error != cudaSuccess) return error;
  const cudaError_t ran = launch(kernel, dim3(tiles, parts), kWarps * 32, kSharedBytes<kTiles>,
                                 stream, p, queries, seen, made, parts);
  if (ran != cudaSuccess || parts == 1) return ran;
  return launch(merge_mla_splits_kernel<T, kPairs>, dim3(tiles, kPairs), kLatent / 4, 0, stream, p,
                seen, made, parts);
}

template <typename T>
bool fits_smem(int tiles) {
  return static_cast<int>(tiles == 1   ? kSharedBytes<1>
                          : tiles == 2 ? kSharedBytes<2>
                                       : kSharedBytes<4>) <=
         device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
}

template <typename T>
cudaError_t attend(const LatentAttentionParams& p, const T* queries, T* seen, float* results,
                   cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (p.shared_dim == kFirst && p.latent == kLatent) {
      // In decoding, no more pairs than a token has.
      const int wanted = p.num_tokens > p.batch || p.num_heads > 32 ? 4 : p.num_heads > 16 ? 2 : 1;
      if (wanted == 4 && fits_smem<T>(4)) return run_tiles<T, 4>(p, queries, seen, results, stream);
      if (wanted == 2 && fits_smem<T>(2)) return run_tiles<T, 2>(p, queries, seen, results, stream);
      if (fits_smem<T>(1)) return run_tiles<T, 1>(p, queries, seen, results, stream);
    }
  }
  const size_t shared = sizeof(float) * (p.shared_dim + p.latent + kFallbackWarps * p.latent);
  return launch(mla_fallback_kernel<T>, static_cast<unsigned>(p.num_tokens * p.num_heads),
                kFallbackWarps * 32, shared, stream, p, queries, seen);
}

template <typename T>
cudaError_t run(const LatentAttentionParams& p, const Scratch& scratch, cudaStream_t stream) {
  char* bytes = static_cast<char*>(p.scratch);
  T* queries = reinterpret_cast<T*>(bytes);
  T* seen = reinterpret_cast<T*>(bytes + scratch.seen);
  const int heads = p.num_heads, own = p.query_dim - p.shared_dim;
  const int64_t dim = p.shared_dim + p.latent;
  cudaError_t error = launch(rope_kernel<T>, p.num_tokens, 256, 0, stream, p, queries);
  if (error != cudaSuccess) return error;
  error = run_up<T>({static_cast<const T*>(p.query) + p.shared_dim, static_cast<const T*>(p.key_up),
                     queries + p.shared_dim, p.num_tokens, own, p.latent,
                     int64_t{heads} * p.query_dim, p.query_dim, heads * dim, dim},
                    heads, stream);
  if (error != cudaSuccess) return error;
  error = attend<T>(p, queries, seen, reinterpret_cast<float*>(bytes + scratch.results), stream);
  if (error != cudaSuccess) return error;
  return run_up<T>(
      {seen, static_cast<const T*>(p.value_up), static_cast<T*>(p.out), p.num_tokens, p.latent,
       p.value_dim, int64_t{heads} * p.latent, p.latent, int64_t{heads} * p.value_dim, p.value_dim},
      heads, stream);
}

}  // namespace

int64_t latent_attention_scratch(DType dtype, int num_tokens, int num_heads, int shared_dim,
                                 int latent) {
  return scratch_of(dtype, static_cast<int64_t>(num_tokens) * num_heads, shared_dim + latent,
                    latent)
      .bytes;
}

cudaError_t latent_attention(DType dtype, const LatentAttentionParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return cudaSuccess;
  const Scratch scratch = scratch_of(dtype, static_cast<int64_t>(p.num_tokens) * p.num_heads,
                                     p.shared_dim + p.latent, p.latent);
  return dispatch_dtype(dtype, [&](auto* type) {
    return run<std::remove_pointer_t<decltype(type)>>(p, scratch, stream);
  });
}

}  // namespace llmc::kernels
