// Decode attention by mma: one new token per sequence, 16-bit types, split KV (flash-decoding).
//
// A block takes one sequence, one KV head and up to 8 of its query heads, over one KV split as
// plan_kv_splits.cu has planned. It normalizes and rotates its heads itself, and appends the new
// key and value. Its mainloop (see also decode_mainloop.cuh) reads the split's keys and values.
// Whole rows are copied to shared memory rounds ahead, the first of them before the previous kernel
// has ended (PDL). The epilogue merges the softmaxes of warps; the block that ends last merges
// those of splits. Reads the visible keys and values once per 8 query heads; writes head_dim
// elements per head.
#include "decode.cuh"

#include "decode_mainloop.cuh"
#include "plan_kv_splits.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

// Epilogue of a warp: writes its maxima, totals and sums to shared memory, for merge(). A warp
// without keys has total 0 and maximum -inf.
template <typename T, typename C, int kSteps, int kWarps, int kTiles, int kHalves>
__device__ __forceinline__ void store_sums(const MmaThread& thread,
                                           const float (&sum)[kHalves][8][4],
                                           const float (&tall)[kTiles][4], const float (&peak)[2],
                                           float (&total)[2],
                                           float (&peak_of)[kWarps][kDecodeHeads],
                                           float (&total_of)[kWarps][kDecodeHeads]) {
  using S = DecodeSharedStorage<T, C, kSteps, kWarps>;
  const int &warp = thread.warp, &g = thread.g, &t = thread.t;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int mask = 4; mask < 32; mask <<= 1) total[c] += __shfl_xor_sync(~0u, total[c], mask);
    if (g == 0) peak_of[warp][2 * t + c] = peak[c], total_of[warp][2 * t + c] = total[c];
  }
  if constexpr (S::kTall)
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        *S::sum(warp * kDecodeHeads + 2 * t + c % 2, 16 * j + g + c / 2 * 8) = tall[j][c];
#pragma unroll
  for (int j = 0; j < (S::kTall ? 0 : kHalves); ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        const int at = 64 * j + 8 * (2 * t + c) + e;
        if (at < S::kDim)
          *reinterpret_cast<float4*>(S::sum(warp * kDecodeHeads + g, at)) =
              make_float4(sum[j][e][c], sum[j][e + 1][c], sum[j][e + 2][c], sum[j][e + 3][c]);
      }
}

// Minimum blocks per SM, to keep ptxas from spilling for a higher occupancy.
template <typename C, int kSteps, int kWarps>
constexpr int kResident = kSteps <= 4 && kWarps == 8 && sizeof(C) == 2 ? 1 : 0;

template <typename T, typename C, int kSteps, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kResident<C, kSteps, kWarps>)
    decode_kernel(AttentionParams p) {
  using S = DecodeSharedStorage<T, C, kSteps, kWarps>;
  // A direct call would hoist other parts of addresses.
  auto ring_of = [&](int warp) { return S::ring(warp); };
  T* queries = reinterpret_cast<T*>(ring_of(kWarps));  // [kDecodeHeads][kPitch]
  NewKv<C> fresh_kv;
  fresh_kv.key = reinterpret_cast<C*>(queries + kDecodeHeads * S::kPitch);
  fresh_kv.value = fresh_kv.key + S::kPitch;
  __shared__ float peak_of[kWarps][kDecodeHeads], total_of[kWarps][kDecodeHeads];
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
  const CacheRows row_of(p, sequence, kv_head);
  C* keys = static_cast<C*>(p.key_cache);
  C* values = static_cast<C*>(p.value_cache);
  const bool has_new = part == parts - 1;
  const int begin = from + thread.warp * kDecodeKeys, limit = has_new ? to - 1 : to;
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
  for (int i = heads * S::kPitch + threadIdx.x; i < kDecodeHeads * S::kPitch; i += kWarps * 32)
    queries[i] = from_float<T>(0.f);
  fresh_kv.position = has_new ? to - 1 : p.past_lens[sequence];
  const int seen = own_from(p, sequence, fresh_kv.position);
  pdl_wait();
  pdl_launch_dependents();

  // One warp per query head, and for the new key and value if they are in this split. Blocks of the
  // same KV head write the same values.
  const T* qkv = static_cast<const T*>(p.qkv) + sequence * p.qkv_stride;
  float* scratch = reinterpret_cast<float*>(fresh_kv.value + S::kPitch) + thread.warp * S::kDim;
  for (int task = warp; task < heads + (has_new ? 2 : 0); task += kWarps) {
    const bool is_query = task < heads, is_value = task == heads + 1;
    C* const fresh = is_value ? fresh_kv.value : fresh_kv.key;
    C* const row = (is_value ? values : keys) + row_of(fresh_kv.position);
    if ((p.reads || p.appended) && !is_query) {
      for (int i = lane; i < S::kDim; i += 32) fresh[i] = i < dim ? row[i] : from_float<C>(0.f);
      continue;
    }
    const int head =
        is_query ? first_head + task : p.num_heads + (is_value ? p.num_kv_heads : 0) + kv_head;
    norm_and_rope<T, S::kDim>(scratch, qkv + head * dim, p,
                              is_query   ? p.q_norm
                              : is_value ? p.v_norm
                                         : p.k_norm,
                              fresh_kv.position, !is_value);
    if (is_query) {
      const float factor = query_factor(p, fresh_kv.position);
      for (int i = lane; i < S::kDim; i += 32)
        queries[task * S::kPitch + i] = from_float<T>(i < dim ? scratch[i] * factor : 0.f);
    } else {
      for (int i = lane; i < S::kDim; i += 32) {
        const C cached = from_float<C>(i < dim ? scratch[i] : 0.f);
        fresh[i] = cached;
        if (i < dim) row[i] = cached;
      }
    }
    __syncwarp();
  }
  __syncthreads();

  float sum[S::kTall ? 1 : S::kHalves][8][4] = {}, tall[S::kTall ? S::kDim / 16 : 1][4] = {};
  float peak[2] = {-INFINITY, -INFINITY}, total[2] = {};  // of heads 2t and 2t + 1
  const float scale = p.scale * (p.softcap > 0 ? 1.f : kLog2E);
  for (int round = 0, start = begin; start < to; ++round, start += kWarps * kDecodeKeys) {
    cp_async_wait<S::kRounds - 1>();
    __syncwarp();
    const Cached<C>* here = ring_of(warp) + round % S::kRounds * S::kRound;
    const KvRound<T, C, kSteps, kWarps> kv{fresh_kv, thread, here, start};
    float score[4] = {}, factor[2];
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const uint4 b = *reinterpret_cast<const uint4*>(queries + g * S::kPitch + 32 * j + 8 * t);
      const uint4 low = kv.key(j, 0), high = kv.key(j, 1);
      const uint32_t even[4] = {low.x, high.x, low.y, high.y},
                     odd[4] = {low.z, high.z, low.w, high.w};
      mma_m16n8k16<T>(score, even, b.x, b.y);
      mma_m16n8k16<T>(score, odd, b.z, b.w);
    }
    update_softmax(p, g, scale, start, seen, to, score, factor, peak, total);
    if constexpr (S::kTall) {
      add_values_transposed(kv, score, factor, tall);
    } else {
      // Rows of the sums are heads: row g needs the factor held by the lanes of heads 2t, 2t + 1.
      const float even_factor = __shfl_sync(~0u, factor[0], g / 2);
      const float odd_factor = __shfl_sync(~0u, factor[1], g / 2);
      const float old = g % 2 ? odd_factor : even_factor;
      const uint32_t weights[4] = {movmatrix_trans(pack2<T>(score[0], score[1])), 0,
                                   movmatrix_trans(pack2<T>(score[2], score[3])), 0};
#pragma unroll
      for (int j = 0; j < S::kHalves; ++j) {
        uint4 row[4];
        const uint32_t* rows[4];
#pragma unroll
        for (int r = 0; r < 4; ++r)
          row[r] = kv.value(j, r), rows[r] = reinterpret_cast<const uint32_t*>(&row[r]);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (start != begin) sum[j][e][0] *= old, sum[j][e][1] *= old;
          const uint32_t pick = e % 2 ? 0x7632 : 0x5410;
          mma_m16n8k16<T>(sum[j][e], weights, __byte_perm(rows[0][e / 2], rows[1][e / 2], pick),
                          __byte_perm(rows[2][e / 2], rows[3][e / 2], pick));
        }
      }
    }
    __syncwarp();  // the round has been read
    copy(round + S::kRounds);
  }
  store_sums<T, C, kSteps, kWarps>(thread, sum, tall, peak, total, peak_of, total_of);
  const int earlier_splits = static_cast<int>(own.packed_index >> 16), of_head = dim + 2,
            of_block = min(p.num_heads, kDecodeHeads) * of_head;
  const int64_t of_all = static_cast<int64_t>(gridDim.x) * of_block;
  int32_t* counter = p.counters + earlier_splits / 2 * gridDim.x +
                     blockIdx.x;  // each earlier split sequence has at least two
  float* results = static_cast<float*>(p.scratch) + earlier_splits * of_all + blockIdx.x * of_block;
  merge<T, S::kDim>(p, peak_of, total_of, [&](int row, int i) { return *S::sum(row, i); }, heads,
                    static_cast<int64_t>(sequence) * p.num_heads + first_head,
                    {part, parts, counter, results, of_head, of_all, shares_prefix(p, sequence)});
}

template <typename T, typename C, int kSteps, int kWarps>
cudaError_t run_warps(const AttentionParams& p, cudaStream_t stream) {
  constexpr size_t kShared = DecodeSharedStorage<T, C, kSteps, kWarps>::kBytes;
  auto kernel = decode_kernel<T, C, kSteps, kWarps>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(decode_columns(p), max_kv_splits(p)), kWarps * 32, kShared, stream, p);
}

template <typename T, typename C, int kSteps, int kWarps>
bool fits() {
  return static_cast<int>(DecodeSharedStorage<T, C, kSteps, kWarps>::kBytes) <=
         device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
}

// With few blocks, more warps each: latency dominates. With more blocks than fit at once, fewer
// warps; with many waves, one warp, so that the last blocks end together.
template <typename T, typename C, int kSteps>
cudaError_t run(const AttentionParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(decode_columns(p) * p.batch);
  if constexpr (kSteps <= 2)
    if (4 * blocks <= num_sms() && fits<T, C, kSteps, 12>())
      return run_warps<T, C, kSteps, 12>(p, stream);
  if (blocks <= num_sms() && fits<T, C, kSteps, 8>()) return run_warps<T, C, kSteps, 8>(p, stream);
  static const unsigned resident = [] {
    if (!fits<T, C, kSteps, 4>()) return 0u;
    constexpr int kShared = DecodeSharedStorage<T, C, kSteps, 4>::kBytes;
    auto kernel = decode_kernel<T, C, kSteps, 4>;
    int blocks = 0;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 4 * 32, kShared);
    return blocks * num_sms();
  }();
  if constexpr (kSteps <= 4)
    if (blocks > 2 * resident) return run_warps<T, C, kSteps, 1>(p, stream);
  if (blocks > resident) return run_warps<T, C, kSteps, 2>(p, stream);
  return run_warps<T, C, kSteps, 4>(p, stream);
}

template <typename T, typename C>
cudaError_t run_cache(const AttentionParams& p, cudaStream_t stream) {
  if (p.head_dim <= 64) return run<T, C, 2>(p, stream);  // few models have 32 or less
  if (p.head_dim <= 96) return run<T, C, 3>(p, stream);
  if (p.head_dim <= 128) return run<T, C, 4>(p, stream);
  if (p.head_dim <= 256) return run<T, C, 8>(p, stream);
  if constexpr (std::is_same_v<T, C>) return run_warps<T, C, 16, 4>(p, stream);
  return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t run_type(const AttentionParams& p, cudaStream_t stream) {
  return p.float8 ? run_cache<T, Float8>(p, stream) : run_cache<T, T>(p, stream);
}

}  // namespace

bool can_decode(DType dtype, const AttentionParams& p) {
  if (dtype == DType::kFloat32) return false;
  return p.head_dim <= 256 || (!p.float8 && fits<__half, __half, 16, 4>());
}

cudaError_t decode(DType dtype, const AttentionParams& p, cudaStream_t stream) {
  if (!p.splits_planned) {
    const cudaError_t error = plan_kv_splits(p, stream);
    if (error != cudaSuccess) return error;
  }
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
