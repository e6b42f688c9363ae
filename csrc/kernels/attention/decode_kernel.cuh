// The decode kernel: one new token per sequence, 16-bit types, split KV (flash-decoding).
//
// A block takes one sequence, one KV head and up to 8 of its query heads, over one KV split as
// plan_kv_splits.cu has planned. It normalizes and rotates its heads itself, and appends the new
// key and value. Its mainloop (see also decode_mainloop.cuh) reads the split's keys and values.
// Whole rows are copied to shared memory rounds ahead, the first of them before the previous kernel
// has ended (PDL). The epilogue merges the softmaxes of warps; the block that ends last merges
// those of splits. Reads the visible keys and values once per 8 query heads; writes head_dim
// elements per head.
//
// With kHeads above 8, a block takes several rows of one sequence: its last token and drafts. Their
// query heads are columns of the same mma tiles, each with its own visible positions. A block has
// the new keys and values of all rows up to its last one, and appends those of the rows it takes.
#pragma once

#include "decode_mainloop.cuh"
#include "plan_kv_splits.cuh"

namespace llmc::device {

// Epilogue of a warp: writes its maxima, totals and sums to shared memory, for merge(). A warp
// without keys has total 0 and maximum -inf.
template <typename T, typename C, int kSteps, int kWarps, int kHeads, int kTall, int kHalves>
__device__ __forceinline__ void store_sums(
    const MmaThread& thread, const float (&sum)[kHalves][8][4], const float (&tall)[kTall][4],
    const float (&peak)[kHeads / 8][2], float (&total)[kHeads / 8][2],
    float (&peak_of)[kWarps][kHeads], float (&total_of)[kWarps][kHeads]) {
  using S = DecodeSharedStorage<T, C, kSteps, kWarps, kHeads>;
  const int &warp = thread.warp, &g = thread.g, &t = thread.t;
#pragma unroll
  for (int tile = 0; tile < kHeads / 8; ++tile)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int head = 8 * tile + 2 * t + c;
      float& all = total[tile][c];
#pragma unroll
      for (int mask = 4; mask < 32; mask <<= 1) all += __shfl_xor_sync(~0u, all, mask);
      if (g == 0) peak_of[warp][head] = peak[tile][c], total_of[warp][head] = all;
    }
  if constexpr (S::kTall)
#pragma unroll
    for (int j = 0; j < kTall; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        *S::sum(warp * kHeads + 2 * t + c % 2, 16 * j + g + c / 2 * 8) = tall[j][c];
#pragma unroll
  for (int j = 0; j < (S::kTall ? 0 : kHalves); ++j)
#pragma unroll
    for (int c = 0; c < kHeads / 4; ++c)
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        const int at = 64 * j + 8 * (2 * t + c % 2) + e, head = c / 2 * 8 + g;
        if (at < S::kDim)
          *reinterpret_cast<float4*>(S::sum(warp * kHeads + head, at)) =
              make_float4(sum[j][e][c], sum[j][e + 1][c], sum[j][e + 2][c], sum[j][e + 3][c]);
      }
}

// Minimum blocks per SM, to keep ptxas from spilling for a higher occupancy.
template <typename C, int kSteps, int kWarps>
constexpr int kResident = kSteps <= 4 && kWarps == 8 && sizeof(C) == 2 ? 1 : 0;

template <typename T, typename C, int kSteps, int kWarps, int kHeads>
__global__ void __launch_bounds__(kWarps * 32, kResident<C, kSteps, kWarps>)
    decode_kernel(AttentionParams p) {
  using S = DecodeSharedStorage<T, C, kSteps, kWarps, kHeads>;
  constexpr bool kRows = kHeads > kDecodeHeads;
  static_assert(kHeads == 8 || (kHeads == 16 && !S::kTall), "sums have 16 rows");
  // A direct call would hoist other parts of addresses.
  auto ring_of = [&](int warp) { return S::ring(warp); };
  T* queries = reinterpret_cast<T*>(ring_of(kWarps));  // [kHeads][kPitch]
  NewKv<C> fresh_kv;
  fresh_kv.key = reinterpret_cast<C*>(queries + kHeads * S::kPitch);
  fresh_kv.value = fresh_kv.key + S::kFresh * S::kPitch;
  __shared__ float peak_of[kWarps][kHeads], total_of[kWarps][kHeads];
  const int dim = p.head_dim, group = p.num_heads / p.num_kv_heads;
  const int chunks = (group + kDecodeHeads - 1) / kDecodeHeads;
  const int kv_head = blockIdx.x / chunks,
            first_head = kv_head * group + blockIdx.x % chunks * kDecodeHeads;
  const int heads = min(kDecodeHeads, (kv_head + 1) * group - first_head);
  const MmaThread thread;
  const int &warp = thread.warp, &lane = thread.lane, &g = thread.g, &t = thread.t;
  // The previous kernel plans the splits, or appends positions.
  if (!p.splits_planned || p.appended) pdl_wait();
  const KvSplit own = p.kv_splits[blockIdx.y];
  if (own.sequence < 0) return;
  const int sequence = own.sequence, from = own.from, to = own.to;
  const int part = static_cast<int>(own.packed_index & 255),
            parts = static_cast<int>(own.packed_index >> 8 & 255);
  const int rows = kRows ? own.rows : 1, earlier = kRows ? own.earlier_rows : 0;
  const CacheRows row_of(p, sequence, kv_head);
  C* keys = static_cast<C*>(p.key_cache);
  C* values = static_cast<C*>(p.value_cache);
  const bool has_new = part == parts - 1;
  // The first new position of the sequence: from there on, nothing is copied.
  const int first_new = kRows ? p.past_lens[sequence] - earlier : 0;
  const int begin = from + thread.warp * kDecodeKeys, limit = kRows     ? min(to, first_new)
                                                              : has_new ? to - 1
                                                                        : to;
  const bool one_block = row_of.in_line(kDecodeKeys), in_line = one_block && dim == S::kDim;
  // Producer: a warp's rounds are kWarps * kDecodeKeys positions apart. The new position is not
  // copied. `block` is that of the round that is copied next, so that no copy waits for the table.
  int block = begin < to ? row_of.block_of(begin) : 0;
  auto copy = [&](int round) {
    const int start = begin + round * kWarps * kDecodeKeys, next = start + kWarps * kDecodeKeys;
    if (start < to) {
      Cached<C>* into = ring_of(warp) + round % S::kRounds * S::kRound;
      // If rows are contiguous, so are a round's vectors.
      const int64_t first = row_of.at(block, start);
      if (next < to) block = row_of.block_of(next);
#pragma unroll
      for (int i = 0; i < kDecodeKeys * S::kVectors / 32; ++i) {
        const int vector = lane + 32 * i, row = vector / S::kVectors, at = vector % S::kVectors;
        const bool there = start + row < limit && 8 * at < dim;
        int64_t from = first + 8 * vector;
        if (!in_line) from = first + static_cast<int64_t>(row) * dim + 8 * at;
        if (!one_block) from = there ? row_of(start + row) + 8 * at : 0;
        cp_async(into + S::key_at(row, at), keys + from, there);
        cp_async(into + S::value_at(row, at), values + from, there);
      }
    }
    cp_async_commit();
  };
  for (int i = 0; i < S::kRounds; ++i) copy(i);
  for (int i = rows * heads * S::kPitch + threadIdx.x; i < kHeads * S::kPitch; i += kWarps * 32)
    queries[i] = from_float<T>(0.f);
  fresh_kv.position = kRows ? first_new : has_new ? to - 1 : p.past_lens[sequence];
  fresh_kv.end = to;
  const int seen = kRows ? 0 : own_from(p, sequence, fresh_kv.position);
  pdl_wait();
  pdl_launch_dependents();

  HeadBounds seen_of[kHeads / 8], end_of[kHeads / 8];
  if constexpr (kRows) {
#pragma unroll
    for (int c = 0; c < kHeads / 4; ++c) {
      const int row = min((8 * (c / 2) + 2 * t + c % 2) / heads, rows - 1);
      const int position = p.past_lens[sequence] + row;
      seen_of[c / 2].of[c % 2] = own_from(p, sequence + row, position);
      end_of[c / 2].of[c % 2] = min(to, position + 1);
    }
  }
  // One warp per query head, and for each new key and value in this split. Blocks of the same KV
  // head write the same values.
  const int first_fresh = kRows ? max(from - first_new, 0) : 0,
            num_fresh = kRows     ? max(to - first_new - first_fresh, 0)
                        : has_new ? 1
                                  : 0;
  float* scratch = S::scratch(fresh_kv.value) + thread.warp * S::kDim;
  for (int task = warp; task < rows * heads + 2 * num_fresh; task += kWarps) {
    const bool is_query = task < rows * heads;
    const int of_kind = is_query ? task : (task - rows * heads) / 2;
    const bool is_value = !is_query && (task - rows * heads) % 2 == 1;
    // The row, counted from the sequence's first.
    const int index = !kRows ? 0 : is_query ? earlier + of_kind / heads : first_fresh + of_kind;
    const int position = fresh_kv.position + index;
    const int token = sequence - earlier + index;
    const T* qkv = static_cast<const T*>(p.qkv) + token * p.qkv_stride;
    C* const fresh = (is_value ? fresh_kv.value : fresh_kv.key) + index * S::kPitch;
    C* const row = (is_value ? values : keys) + row_of(position);
    if ((p.reads || p.appended) && !is_query) {
      for (int i = lane; i < S::kDim; i += 32) fresh[i] = i < dim ? row[i] : from_float<C>(0.f);
      continue;
    }
    const int head = is_query ? first_head + of_kind % heads
                              : p.num_heads + (is_value ? p.num_kv_heads : 0) + kv_head;
    norm_and_rope<T, S::kDim>(scratch, qkv + head * dim, p,
                              is_query   ? p.q_norm
                              : is_value ? p.v_norm
                                         : p.k_norm,
                              RotaryRow(p, token, position), !is_value);
    if (is_query) {
      const float factor = query_factor(p, position);
      for (int i = lane; i < S::kDim; i += 32)
        queries[task * S::kPitch + i] = from_float<T>(i < dim ? scratch[i] * factor : 0.f);
    } else {
      const bool writes = index >= earlier;
      for (int i = lane; i < S::kDim; i += 32) {
        const C cached = from_float<C>(i < dim ? scratch[i] : 0.f);
        fresh[i] = cached;
        if (i < dim && writes) row[i] = cached;
      }
    }
    __syncwarp();
  }
  __syncthreads();

  float sum[S::kTall ? 1 : S::kHalves][8][4] = {}, tall[S::kTall ? S::kDim / 16 : 1][4] = {};
  float peak[kHeads / 8][2], total[kHeads / 8][2] = {};  // of heads 2t and 2t + 1 of each tile
#pragma unroll
  for (float (&of_tile)[2] : peak) of_tile[0] = of_tile[1] = -INFINITY;
  const float scale = p.scale * (p.softcap > 0 ? 1.f : kLog2E);
  for (int round = 0, start = begin; start < to; ++round, start += kWarps * kDecodeKeys) {
    cp_async_wait<S::kRounds - 1>();
    __syncwarp();
    const Cached<C>* here = ring_of(warp) + round % S::kRounds * S::kRound;
    const KvRound<T, C, kSteps, kWarps, kHeads> kv{fresh_kv, thread, here, start};
    float score[kHeads / 8][4] = {}, factor[kHeads / 8][2];
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const uint4 low = kv.key(j, 0), high = kv.key(j, 1);
      const uint32_t even[4] = {low.x, high.x, low.y, high.y},
                     odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int tile = 0; tile < kHeads / 8; ++tile) {
        const uint4 b =
            *reinterpret_cast<const uint4*>(queries + (8 * tile + g) * S::kPitch + 32 * j + 8 * t);
        mma_m16n8k16<T>(score[tile], even, b.x, b.y);
        mma_m16n8k16<T>(score[tile], odd, b.z, b.w);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kHeads / 8; ++tile)
      if constexpr (kRows)
        update_softmax(p, g, scale, start, seen_of[tile], end_of[tile], score[tile], factor[tile],
                       peak[tile], total[tile]);
      else update_softmax(p, g, scale, start, seen, to, score[0], factor[0], peak[0], total[0]);
    if constexpr (S::kTall) {
      add_values_transposed(kv, score[0], factor[0], tall);
    } else {
      // Rows of the sums are heads: row g needs the factor held by the lanes of heads 2t, 2t + 1.
      float old[kHeads / 8];
      uint32_t weights[4] = {};
#pragma unroll
      for (int tile = 0; tile < kHeads / 8; ++tile) {
        const float even_factor = __shfl_sync(~0u, factor[tile][0], g / 2);
        const float odd_factor = __shfl_sync(~0u, factor[tile][1], g / 2);
        old[tile] = g % 2 ? odd_factor : even_factor;
        weights[tile] = movmatrix_trans(pack2<T>(score[tile][0], score[tile][1]));
        weights[2 + tile] = movmatrix_trans(pack2<T>(score[tile][2], score[tile][3]));
      }
#pragma unroll
      for (int j = 0; j < S::kHalves; ++j) {
        uint4 row[4];
        const uint32_t* rows[4];
#pragma unroll
        for (int r = 0; r < 4; ++r)
          row[r] = kv.value(j, r), rows[r] = reinterpret_cast<const uint32_t*>(&row[r]);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (start != begin)
#pragma unroll
            for (int c = 0; c < kHeads / 4; ++c) sum[j][e][c] *= old[c / 2];
          const uint32_t pick = e % 2 ? 0x7632 : 0x5410;
          mma_m16n8k16<T>(sum[j][e], weights, __byte_perm(rows[0][e / 2], rows[1][e / 2], pick),
                          __byte_perm(rows[2][e / 2], rows[3][e / 2], pick));
        }
      }
    }
    __syncwarp();  // the round has been read
    copy(round + S::kRounds);
  }
  store_sums<T, C, kSteps, kWarps, kHeads>(thread, sum, tall, peak, total, peak_of, total_of);
  const int earlier_splits = static_cast<int>(own.packed_index >> 16), of_head = dim + 2,
            of_block = (kRows ? kHeads : min(p.num_heads, kDecodeHeads)) * of_head;
  const int64_t of_all = static_cast<int64_t>(gridDim.x) * of_block;
  int32_t* counter = p.counters + earlier_splits / 2 * gridDim.x +
                     blockIdx.x;  // each earlier split sequence has at least two
  float* results = static_cast<float*>(p.scratch) + earlier_splits * of_all + blockIdx.x * of_block;
  merge<T, S::kDim>(p, peak_of, total_of, [&](int row, int i) { return *S::sum(row, i); },
                    rows * heads, static_cast<int64_t>(sequence) * p.num_heads + first_head,
                    {part, parts, counter, results, of_head, of_all, shares_prefix(p, sequence),
                     heads, p.num_heads});
}

}  // namespace llmc::device

namespace llmc::kernels {

template <typename T, typename C, int kSteps, int kWarps, int kHeads>
bool fits_decode() {
  constexpr size_t kShared = device::DecodeSharedStorage<T, C, kSteps, kWarps, kHeads>::kBytes;
  return static_cast<int>(kShared) <=
         device::device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
}

template <typename T, typename C, int kSteps, int kWarps, int kHeads>
cudaError_t launch_decode(const AttentionParams& p, cudaStream_t stream) {
  constexpr size_t kShared = device::DecodeSharedStorage<T, C, kSteps, kWarps, kHeads>::kBytes;
  auto kernel = device::decode_kernel<T, C, kSteps, kWarps, kHeads>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (error != cudaSuccess) return error;
  return device::launch(kernel, dim3(decode_columns(p), max_kv_splits(p)), kWarps * 32, kShared,
                        stream, p);
}

// Blocks that run at once.
template <typename T, typename C, int kSteps, int kWarps, int kHeads>
unsigned resident_decode() {
  if (!fits_decode<T, C, kSteps, kWarps, kHeads>()) return 0u;
  constexpr int kShared = device::DecodeSharedStorage<T, C, kSteps, kWarps, kHeads>::kBytes;
  auto kernel = device::decode_kernel<T, C, kSteps, kWarps, kHeads>;
  int blocks = 0;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kWarps * 32, kShared);
  return blocks * device::num_sms();
}

}  // namespace llmc::kernels
