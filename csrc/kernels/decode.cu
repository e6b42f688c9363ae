// Attention of one new token per sequence on tensor cores, 16-bit types.
//
// A block takes one sequence, one KV head and up to 8 of its query heads, over one part of the cached
// positions (flash-decoding). It prepares its heads itself and writes the new key and value. A warp takes 16
// keys at a time, as the tensor core wants them: scores are K · Qᵀ with keys as the tile's rows, the inner
// dimension permuted so that a thread has 8 elements of a key next to each other; their transpose (movmatrix)
// times V gives the sums, V's rows paired by byte permutes and its columns permuted so that a thread has 8
// elements of a value; where a head is longer than 256 the sums are Vᵀ times the scores, which takes half the registers. Keys and values are copied into shared memory some rounds ahead, whole rows at a time,
// the first of them before the kernel ahead has ended. The warps' softmaxes are merged at the
// end, and the parts' by whichever block ends last. Reads the visible keys and values once per 8 query heads.
#include "attention.cuh"
#include "decode.cuh"
#include "tensor_core.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kHeads = 8, kKeys = 16;
template <int kSteps>
constexpr int kDecodeKeys = kSteps > 8 ? 128 : 256;  // per part
constexpr int kStartKeys = 128;   // what beginning and merging a part cost, in positions that are read meanwhile

// How many positions a part should have. Multiprocessors end together where each has as many blocks as the others: the
// least positions that the busiest one reads, of all numbers of parts that the longest sequence may be divided into. Rows
// that fill up a captured batch have one position, and count for nothing.
template <int kKeysOfPart>
__device__ __forceinline__ int positions_per_part(const AttentionParams& p, int parts, int columns, int processors) {
  const int lane = threadIdx.x % 32;
  auto length_of = [&](int i) {
    return i < p.batch ? p.past_lens[i] + 1 - own_from(p, i, p.past_lens[i]) / kKeys * kKeys : 0;
  };
  int longest = 0;
  for (int i = lane; i < p.batch; i += 32) longest = max(longest, length_of(i));
  longest = __reduce_max_sync(~0u, longest);
  const int most = min(parts, (longest + kKeysOfPart - 1) / kKeysOfPart);
  if (most == 1) return longest;
  const int wanted = lane + 1, each = (longest + wanted - 1) / wanted;
  const float per_each = 1.f / each;
  int blocks = 0;
  for (int first = 0; first < p.batch; first += 32) {
    const int own = length_of(first + lane);
    for (int i = 0; i < min(32, p.batch - first); ++i) {
      const int length = __shfl_sync(~0u, own, i);
      if (length > 1) blocks += 1 + static_cast<int>((length - 1) * per_each);
    }
  }
  const int rounds = (columns * blocks + processors - 1) / processors;
  const int64_t cost = static_cast<int64_t>(rounds) * (each + kStartKeys) << 32 | each;
  int64_t least = wanted <= most ? cost : INT64_MAX;
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) least = min(least, static_cast<int64_t>(__shfl_xor_sync(~0u, least, mask)));
  return static_cast<int>(least & 0xffffffff);
}

__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
  uint32_t turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(matrix));
  return turned;
}

// A copy into shared memory that goes on beside the thread; zeros where not `there`. (Past L1, and with 256 bytes of L2
// fetched at once, it was measured to be slower here.)
template <typename V>
__device__ __forceinline__ void start_copy(V* to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;"
               :: "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from), "n"(sizeof(V)),
                  "r"(there ? static_cast<int>(sizeof(V)) : 0)
               : "memory");
}

// Eight cached elements as the tensor core takes them.
template <typename T, typename C>
__device__ __forceinline__ uint4 words_of(const Cached<C>& cached) {
  const Vec<T, 8> wide = widen<T, C>(cached);
  return *reinterpret_cast<const uint4*>(&wide);
}

// kSteps: head_dim in units of 32, rounded up.
template <typename T, typename C, int kSteps, int kWarps>
struct Layout {
  static constexpr int kDim = kSteps * 32, kPitch = kDim + 8, kHalves = (kDim + 63) / 64;
  // Of a warp, rounds of 16 keys and their values that are under way.
  static constexpr int kRounds = (kWarps > 4 && kDim > 128) || kDim > 256 ? 1 : 2;
  static constexpr bool kTall = kDim > 256;  // sums have elements of a value as rows, and heads as columns
  // Vectors of 8 elements: of a row, of a row's place in shared memory, of a round.
  static constexpr int kVectors = kDim / 8, kRow = kSteps == 3 ? 16 : kVectors, kRound = 2 * kKeys * kRow;
  // Where vector `at` of a row is: no two lanes that read together share a bank.
  __device__ static int key_at(int row, int at) { return row * kRow + (at ^ (row % 4 * 4 & (kRow - 1))); }
  __device__ static int value_at(int row, int at) {
    return (kKeys + row) * kRow + (at ^ (row & (kTall ? 7 : 6) & (kRow - 1)));
  }
  static constexpr size_t kShared = sizeof(Cached<C>) * kWarps * kRounds * kRound + sizeof(T) * kHeads * kPitch +
                                    sizeof(C) * 2 * kPitch + sizeof(float) * kWarps * kDim;
  // A warp's sums replace its keys and values.
  static_assert(sizeof(Cached<C>) * kRounds * kRound >= sizeof(float) * kHeads * kDim);
};

// Blocks that a multiprocessor should have room for, where ptxas, left alone, keeps registers in memory for more.
template <typename C, int kSteps, int kWarps>
constexpr int kResident = kSteps == 2 && kWarps == 8 && sizeof(C) == 2 ? 1 : 0;

template <typename T, typename C, int kSteps, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kResident<C, kSteps, kWarps>) 
    decode_kernel(AttentionParams p, int parts, int processors) {
  using L = Layout<T, C, kSteps, kWarps>;
  constexpr int kDim = L::kDim, kPitch = L::kPitch, kHalves = L::kHalves;
  extern __shared__ uint4 raw[];
  auto ring_of = [&](int warp) { return reinterpret_cast<Cached<C>*>(raw) + warp * L::kRounds * L::kRound; };
  T* queries = reinterpret_cast<T*>(ring_of(kWarps));              // [kHeads][kPitch]
  C* fresh_key = reinterpret_cast<C*>(queries + kHeads * kPitch);  // [kPitch]: the new position's, as it is cached
  C* fresh_value = fresh_key + kPitch;
  __shared__ float peak_of[kWarps][kHeads], total_of[kWarps][kHeads];
  const int dim = p.head_dim, group = p.num_heads / p.num_kv_heads;
  const int chunks = (group + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.x / chunks, first_head = kv_head * group + blockIdx.x % chunks * kHeads;
  const int heads = min(kHeads, (kv_head + 1) * group - first_head);
  const int sequence = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int position = p.past_lens[sequence];
  // Parts, and so a warp's rounds, begin at multiples of kKeys: then a round's keys are in one block.
  const int seen = own_from(p, sequence, position);
  const int begin = seen / kKeys * kKeys, count = position + 1 - begin, part = blockIdx.z;
  const int each = parts > 1 ? positions_per_part<kDecodeKeys<kSteps>>(p, parts, gridDim.x, processors) : count;
  const int wanted = min(parts, (count + each - 1) / each);
  const int per_part = (count + wanted * kKeys - 1) / (wanted * kKeys) * kKeys;
  const int used = (count + per_part - 1) / per_part;
  if (part >= used) return;
  const int from = begin + part * per_part, to = min(position + 1, from + per_part);
  const CacheRows row_of(p, sequence, kv_head);
  C* keys = static_cast<C*>(p.key_cache);
  C* values = static_cast<C*>(p.value_cache);
  // A warp's rounds begin kWarps · kKeys positions apart. The new position is copied by none.
  const int mine = from + warp * kKeys, limit = min(to, position);
  const bool one_block = row_of.in_line(kKeys), in_line = one_block && dim == kDim;
  // Of the round that is copied next, so that nothing waits for the table.
  int block = mine < to ? row_of.block_of(mine) : 0;
  auto copy = [&](int round) {
    const int start = mine + round * kWarps * kKeys, next = start + kWarps * kKeys;
    if (start < to) {
      Cached<C>* into = ring_of(warp) + round % L::kRounds * L::kRound;
      // Where rows follow one another, a round's vectors do.
      const int64_t first = row_of.at(block, start);
      if (next < to) block = row_of.block_of(next);
#pragma unroll
      for (int i = 0; i < kKeys * L::kVectors / 32; ++i) {
        const int vector = lane + 32 * i, row = vector / L::kVectors, at = vector % L::kVectors;
        const bool there = start + row < limit && 8 * at < dim;
        int64_t from = first + 8 * vector;
        if (!in_line) from = first + static_cast<int64_t>(row) * dim + 8 * at;
        if (!one_block) from = there ? row_of(start + row) + 8 * at : 0;
        start_copy(into + L::key_at(row, at), keys + from, there);
        start_copy(into + L::value_at(row, at), values + from, there);
      }
    }
    end_group();
  };
  for (int i = 0; i < L::kRounds; ++i) copy(i);
  for (int i = heads * kPitch + threadIdx.x; i < kHeads * kPitch; i += kWarps * 32)
    queries[i] = from_float<T>(0.f);
  wait_for_inputs();
  let_next_start();

  const T* qkv = static_cast<const T*>(p.qkv) + sequence * p.qkv_pitch;
  // A warp for each query head, and where the new position is this block's, for its key and its value.
  // Chunks of one KV head write the same.
  float* scratch = reinterpret_cast<float*>(fresh_value + kPitch) + warp * kDim;
  for (int task = warp; task < heads + (to == position + 1 ? 2 : 0); task += kWarps) {
    const bool is_query = task < heads, is_value = task == heads + 1;
    C* const fresh = is_value ? fresh_value : fresh_key;
    C* const row = (is_value ? values : keys) + row_of(position);
    if (p.reads && !is_query) {
      for (int i = lane; i < kDim; i += 32) fresh[i] = i < dim ? row[i] : from_float<C>(0.f);
      continue;
    }
    const int head = is_query ? first_head + task : p.num_heads + (is_value ? p.num_kv_heads : 0) + kv_head;
    prepare_head<T, kDim>(scratch, qkv + head * dim, p, is_query ? p.q_norm : is_value ? p.v_norm : p.k_norm, position,
                          !is_value);
    if (is_query) {
      const float factor = query_factor(p, position);
      for (int i = lane; i < kDim; i += 32) queries[task * kPitch + i] = from_float<T>(i < dim ? scratch[i] * factor : 0.f);
    } else {
      for (int i = lane; i < kDim; i += 32) {
        const C cached = from_float<C>(i < dim ? scratch[i] : 0.f);
        fresh[i] = cached;
        if (i < dim) row[i] = cached;
      }
    }
    __syncwarp();
  }
  __syncthreads();

  float sum[L::kTall ? 1 : kHalves][8][4] = {}, tall[L::kTall ? kDim / 16 : 1][4] = {};
  float peak[2] = {-INFINITY, -INFINITY}, total[2] = {};  // of heads 2t and 2t + 1
  const float scale = p.scale * (p.softcap > 0 ? 1.f : kLog2E);
  for (int round = 0, start = mine; start < to; ++round, start += kWarps * kKeys) {
    wait_for_group<L::kRounds - 1>();
    __syncwarp();
    const Cached<C>* here = ring_of(warp) + round % L::kRounds * L::kRound;
    // Vector j of row r, or of the new position.
    auto key = [&](int j, int r) {
      const int row = g + 8 * r, at = 4 * j + t;
      return words_of<T, C>(start + row == position ? load_cached(fresh_key + 8 * at) : here[L::key_at(row, at)]);
    };
    auto value = [&](int j, int r) {
      const int row = 2 * t + r % 2 + r / 2 * 8, at = 8 * j + g;
      if (at >= L::kVectors) return uint4{};
      return words_of<T, C>(start + row == position ? load_cached(fresh_value + 8 * at) : here[L::value_at(row, at)]);
    };
    float score[4] = {};
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const uint4 b = *reinterpret_cast<const uint4*>(queries + g * kPitch + 32 * j + 8 * t);
      const uint4 low = key(j, 0), high = key(j, 1);
      const uint32_t even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
      multiply<T>(score, even, b.x, b.y);
      multiply<T>(score, odd, b.z, b.w);
    }
    float factor[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float s = score[2 * r + c] * scale;
        if (p.softcap > 0) s = p.softcap * tanhf(s / p.softcap) * kLog2E;
        const int key = start + g + 8 * r;
        score[2 * r + c] = key < to && key >= seen ? s : -INFINITY;
      }
      float higher = fmaxf(score[c], score[2 + c]);
#pragma unroll
      for (int mask = 4; mask < 32; mask <<= 1) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, mask));
      higher = fmaxf(higher, peak[c]);  // finite: a round has a key that is seen
      factor[c] = exp2f(peak[c] - higher);
      peak[c] = higher;
      score[c] = exp2f(score[c] - higher);
      score[2 + c] = exp2f(score[2 + c] - higher);
      total[c] = total[c] * factor[c] + score[c] + score[2 + c];
    }
    if constexpr (L::kTall) {  // the sums' columns are heads, as the scores'
      const uint32_t weights[2] = {transpose(pack<T>(score[0], score[1])), transpose(pack<T>(score[2], score[3]))};
      const int key = lane % 8 + lane / 16 * 8;
#pragma unroll
      for (int j = 0; j < kDim / 16; ++j) {
        const int at = 2 * j + lane / 8 % 2;
        uint32_t a[4];
        load_matrices<true>(a, start + key == position ? reinterpret_cast<const void*>(fresh_value + 8 * at)
                                                       : here + L::value_at(key, at));
#pragma unroll
        for (int c = 0; c < 4; ++c) tall[j][c] *= factor[c % 2];
        multiply<T>(tall[j], a, weights[0], weights[1]);
      }
      __syncwarp();
      copy(round + L::kRounds);
      continue;
    }
    // The sums' rows are heads: row g wants the factor that the lanes of heads 2t, 2t + 1 hold.
    const float even_factor = __shfl_sync(~0u, factor[0], g / 2);
    const float odd_factor = __shfl_sync(~0u, factor[1], g / 2);
    const float old = g % 2 ? odd_factor : even_factor;
    const uint32_t weights[4] = {transpose(pack<T>(score[0], score[1])), 0,
                                 transpose(pack<T>(score[2], score[3])), 0};
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
      uint4 row[4];
      const uint32_t* rows[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) row[r] = value(j, r), rows[r] = reinterpret_cast<const uint32_t*>(&row[r]);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (start != mine) sum[j][e][0] *= old, sum[j][e][1] *= old;
        const uint32_t pick = e % 2 ? 0x7632 : 0x5410;
        multiply<T>(sum[j][e], weights, __byte_perm(rows[0][e / 2], rows[1][e / 2], pick),
                    __byte_perm(rows[2][e / 2], rows[3][e / 2], pick));
      }
    }
    __syncwarp();  // the round has been read
    copy(round + L::kRounds);
  }
  // Merge the warps. A warp without keys has total 0 and peak -inf.
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int mask = 4; mask < 32; mask <<= 1) total[c] += __shfl_xor_sync(~0u, total[c], mask);
    if (g == 0) peak_of[warp][2 * t + c] = peak[c], total_of[warp][2 * t + c] = total[c];
  }
  // A row's fours of elements stand where lanes write to different banks.
  auto place = [&](int row, int i) {
    return reinterpret_cast<float*>(ring_of(row / kHeads)) + row % kHeads * kDim +
           (i ^ ((i >> 5 & 1) | (row & 1) << 1) << 2);
  };
  if constexpr (L::kTall)
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) *place(warp * kHeads + 2 * t + c % 2, 16 * j + g + c / 2 * 8) = tall[j][c];
#pragma unroll
  for (int j = 0; j < (L::kTall ? 0 : kHalves); ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        const int at = 64 * j + 8 * (2 * t + c) + e;
        if (at < kDim)
          *reinterpret_cast<float4*>(place(warp * kHeads + g, at)) =
              make_float4(sum[j][e][c], sum[j][e + 1][c], sum[j][e + 2][c], sum[j][e + 3][c]);
      }
  merge<T, kDim>(p, peak_of, total_of, [&](int row, int i) { return *place(row, i); }, heads,
                 static_cast<int64_t>(sequence) * p.num_heads + first_head, {part, used, parts, shares_prefix(p, sequence)});
}

template <typename T, typename C, int kSteps, int kWarps>
cudaError_t run_warps(const AttentionParams& p, int columns, cudaStream_t stream) {
  constexpr size_t kShared = Layout<T, C, kSteps, kWarps>::kShared;
  const int blocks = columns * p.batch;
  // Blocks that fill a multiprocessor each are not to wait for others that have nothing to do.
  const int most = parts_for(blocks, p.max_seq_len, kDecodeKeys<kSteps>, kWarps > 4 ? kEnoughBlocks : kAttentionCounters);
  const int parts = p.prefix.of == nullptr ? most : min(most, kMaxParts - kPrefixParts);  // a warp merges all
  auto kernel = decode_kernel<T, C, kSteps, kWarps>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(kShared));
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(columns, p.batch, parts), kWarps * 32, kShared, stream, p, parts,
                static_cast<int>(multiprocessors()));
}

template <typename T, typename C, int kSteps, int kWarps>
bool fits() {
  return static_cast<int>(Layout<T, C, kSteps, kWarps>::kShared) <=
         device_property<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
}

// Few blocks have more warps each: then latency is what counts. Blocks that do not all fit at once have fewer, and
// where many wait for their turn, one: then the last ones end together.
template <typename T, typename C, int kSteps>
cudaError_t run(const AttentionParams& p, cudaStream_t stream) {
  const int group = p.num_heads / p.num_kv_heads;
  const int columns = p.num_kv_heads * ((group + kHeads - 1) / kHeads);
  const auto blocks = static_cast<unsigned>(columns * p.batch);
  if constexpr (kSteps <= 4)
    if (4 * blocks <= multiprocessors() && fits<T, C, kSteps, 12>())
      return run_warps<T, C, kSteps, 12>(p, columns, stream);
  if (blocks <= multiprocessors() && fits<T, C, kSteps, 8>())
    return run_warps<T, C, kSteps, 8>(p, columns, stream);
  static const unsigned resident = [] {
    if (!fits<T, C, kSteps, 4>()) return 0u;
    constexpr int kShared = Layout<T, C, kSteps, 4>::kShared;
    auto kernel = decode_kernel<T, C, kSteps, 4>;
    int blocks = 0;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 4 * 32, kShared);
    return blocks * multiprocessors();
  }();
  if constexpr (kSteps <= 4)
    if (blocks > 2 * resident) return run_warps<T, C, kSteps, 1>(p, columns, stream);
  if (blocks > resident) return run_warps<T, C, kSteps, 2>(p, columns, stream);
  return run_warps<T, C, kSteps, 4>(p, columns, stream);
}

template <typename T, typename C>
cudaError_t run_cache(const AttentionParams& p, cudaStream_t stream) {
  if (p.head_dim <= 64) return run<T, C, 2>(p, stream);  // few models have 32 or less
  if (p.head_dim <= 96) return run<T, C, 3>(p, stream);
  if (p.head_dim <= 128) return run<T, C, 4>(p, stream);
  if (p.head_dim <= 256) return run<T, C, 8>(p, stream);
  const int chunks = (p.num_heads / p.num_kv_heads + kHeads - 1) / kHeads;
  if constexpr (std::is_same_v<T, C>) return run_warps<T, C, 16, 4>(p, p.num_kv_heads * chunks, stream);
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
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
