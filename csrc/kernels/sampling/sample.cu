// Sampling of one token per row: greedy, or from the softmax at a temperature after top_k, top_p,
// min_p and typical_p, in this order.
//
// A block takes a row, and warp w a contiguous segment of it, so that the order of tokens is the
// order of warps. Probabilities are integers, exp(x - max) * 2^31: sums do not depend on the order
// of atomics, and cuts are exact except for tokens less likely than 2^-31 of the most likely, which
// never appear. A cut is the largest key at or above which enough tokens or probability lie. Keys
// are the bits of logits in sortable form; for typical_p, of the distance of a token's information
// from the entropy. Cuts are found by radix selection: digit by digit, with histograms of the keys.
//
// If the cuts can only leave likely tokens, these are copied to shared memory first, and the rest
// works on the copy: the row is read 3 times. If they may leave more than kListed, it is read
// twice, and once more per cut and digit: two digits for 16-bit logits, three for float32 and for
// typical_p, which takes one more pass for the entropy.
//
// The random number is Philox4x64-10 of the sequence's seed and the number of generated tokens,
// equal to numpy.random.Philox(key=seed, counter=num_generated).
#include "../common/device.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kThreads = 1024, kWarps = kThreads / 32, kDigit = 11, kBins = 1 << kDigit,
              kListed = 8192;

__device__ uint64_t philox(uint64_t seed, uint64_t counter) {
  uint64_t c0 = counter + 1, c1 = 0, c2 = 0, c3 = 0, k0 = seed, k1 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t m0 = 0xD2E7470EE14C6C93u, m1 = 0xCA5A826395121157u;
    const uint64_t high0 = __umul64hi(m0, c0), low0 = m0 * c0, high1 = __umul64hi(m1, c2),
                   low1 = m1 * c2;
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B97F4A7C15u, k1 += 0xBB67AE8584CAA73Bu;
  }
  return c0;
}

// A logit's bits in sortable form.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
template <typename T>
__device__ __forceinline__ uint32_t key_of(T x) {
  const uint32_t bits = *reinterpret_cast<const uint16_t*>(&x);
  return bits >> 15 ? ~bits & 0xffffu : bits | 0x8000u;
}

// The logit of a key.
template <typename T>
__device__ __forceinline__ T logit_of(uint32_t key) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
  } else {
    const auto bits = static_cast<uint16_t>(key >> 15 ? key & 0x7fffu : ~key);
    return *reinterpret_cast<const T*>(&bits);
  }
}

// Calls f(x, index) for indices [begin, end) of a row. kLanes adjacent threads, of a warp or of the
// block, take kVec adjacent tokens each in turn, and kAhead iterations are loaded at once.
template <int kLanes, typename T, typename F>
__device__ void for_each(const T* row, int begin, int end, F&& f) {
  constexpr int kWidth = kVec<T>, kTurn = kLanes * kWidth, kAhead = 4;
  const bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
  int i = begin + static_cast<int>(threadIdx.x % kLanes) * kWidth;
  for (; aligned && i + (kAhead - 1) * kTurn + kWidth <= end; i += kAhead * kTurn) {
    Vec<T, kWidth> read[kAhead];
#pragma unroll
    for (int turn = 0; turn < kAhead; ++turn) read[turn] = load<T, kWidth>(row + i + turn * kTurn);
#pragma unroll
    for (int turn = 0; turn < kAhead; ++turn) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) f(read[turn].data[k], i + turn * kTurn + k);
    }
  }
  for (; i < end; i += kTurn) {
    if (aligned && i + kWidth <= end) {
      const auto read = load<T, kWidth>(row + i);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) f(read.data[k], i + k);
    } else {
      for (int k = 0; k < kWidth && i + k < end; ++k) f(row[i + k], i + k);
    }
  }
}

// Sum of `value`, one per warp, over the warps before the caller's; `total` is the sum over all.
__device__ uint64_t scan_warps(uint64_t value, uint64_t* shared, uint64_t& total) {
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  uint64_t before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == threadIdx.x / 32) before = total;
    total += shared[w];
  }
  return before;
}

__device__ __forceinline__ uint64_t warp_total(uint64_t x) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

// Sum over the block in a fixed order.
__device__ double block_total(double x, double* shared) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  double total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += shared[w];
  return total;
}

// The kept tokens of a row: keys above `key`, and the first `ties` tokens with that key.
struct Cut {
  uint32_t key;
  uint64_t ties, above,
      each;  // above: probability of the keys above; each: of one token with the key
};

template <typename T>
struct Row {
  const T* logits;
  int begin, end;     // the warp's segment
  float peak, scale;  // maximum logit; log2(e) / temperature

  __device__ __forceinline__ uint32_t probability(T x) const {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;"
        : "=f"(power)
        : "f"(fmaf(to_float(x), scale, 31 - peak * scale)));
    return __float2uint_rz(power);
  }
  // log2 of the probability relative to the most likely token.
  __device__ __forceinline__ float logarithm(T x) const { return (to_float(x) - peak) * scale; }

  template <typename F>
  __device__ void for_each(F&& f) const {
    kernels::for_each<32>(logits, begin, end, f);
  }
  // Divides `count` tokens among the warps, in whole iterations.
  __device__ void divide(int count) {
    constexpr int kTurn = 32 * kVec<T>;
    const int segment = (count + kWarps * kTurn - 1) / (kWarps * kTurn) * kTurn,
              warp = threadIdx.x / 32;
    begin = min(count, warp * segment), end = min(count, (warp + 1) * segment);
  }
};

struct Histogram {
  uint32_t count[kBins], low[kBins], high[kBins];  // halves of the probability
  uint64_t warps[kWarps];
  uint32_t bin;
  uint64_t above, count_above;
};

// Tokens with one key, counted together.
struct Lump {
  uint32_t key;
  uint64_t count, mass;
};

// The largest key at or above which `target` tokens (for_mass: as much probability) lie, among a
// lump and the tokens of the row with counts(x) (for_mass: with any probability). Keys have kBits
// bits.
template <int kBits, typename T, typename Key, typename Counts>
__device__ Cut find_cut(const Row<T>& row, Histogram& h, uint64_t target, bool for_mass,
                        Key&& key_at, Counts&& counts, Lump lump = {}) {
  Cut cut{};
  uint64_t found = 0;  // tokens, or probability, above the keys with prefix cut.key
  for (int shift = kBits, bits; shift > 0;) {
    const int before = shift;
    bits = min(kDigit, shift);
    shift -= bits;
    const bool counted = !for_mass || shift == 0;  // the count only matters for the last digit
    auto bin_of = [&](uint32_t key) { return (key >> shift) & ((1u << bits) - 1); };
    auto begins_alike = [&](uint32_t key) { return before >= kBits || key >> before == cut.key; };
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kThreads) h.count[i] = h.low[i] = h.high[i] = 0;
    __syncthreads();
    if (threadIdx.x == 0 && lump.count > 0 && begins_alike(lump.key)) {
      const uint32_t bin = bin_of(lump.key), low = static_cast<uint32_t>(lump.mass);
      atomicAdd(&h.count[bin], static_cast<uint32_t>(lump.count));
      const uint32_t old = atomicAdd(&h.low[bin], low);
      atomicAdd(&h.high[bin], static_cast<uint32_t>(lump.mass >> 32) + (old + low < old));
    }
    row.for_each([&](T x, int) {
      if (!counts(x)) return;
      const uint32_t key = key_at(x);
      if (!begins_alike(key)) return;
      const uint32_t mass = row.probability(x);
      if (mass == 0 && for_mass) return;
      const uint32_t bin = bin_of(key);
      if (counted) atomicAdd(&h.count[bin], 1u);
      const uint32_t old = atomicAdd(&h.low[bin], mass);
      if (old + mass < old) atomicAdd(&h.high[bin], 1u);
    });
    __syncthreads();
    // Thread i has bins 2 i and 2 i + 1, from the highest.
    static_assert(kBins == 2 * kThreads);
    uint64_t mass[2], count[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int bin = kBins - 1 - (2 * threadIdx.x + k);
      mass[k] = (static_cast<uint64_t>(h.high[bin]) << 32) + h.low[bin], count[k] = h.count[bin];
    }
    uint64_t total_mass, total_count;
    const uint64_t mass_here = warp_scan(mass[0] + mass[1]),
                   count_here = warp_scan(count[0] + count[1]);
    uint64_t mass_before = scan_warps(__shfl_sync(~0u, mass_here, 31), h.warps, total_mass) +
                           mass_here - mass[0] - mass[1];
    uint64_t count_before = scan_warps(__shfl_sync(~0u, count_here, 31), h.warps, total_count) +
                            count_here - count[0] - count[1];
    const uint64_t wanted = min(target - found, for_mass ? total_mass : total_count);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint64_t past = for_mass ? mass_before : count_before,
                     own = for_mass ? mass[k] : count[k];
      if (past < wanted && wanted <= past + own)
        h.bin = kBins - 1 - (2 * threadIdx.x + k), h.above = mass_before,
        h.count_above = count_before;
      mass_before += mass[k], count_before += count[k];
    }
    __syncthreads();
    cut.key = (cut.key << bits) | h.bin;
    cut.above += h.above;
    found += for_mass ? h.above : h.count_above;
    if (shift > 0) continue;
    const uint64_t all = (static_cast<uint64_t>(h.high[h.bin]) << 32) + h.low[h.bin];
    cut.each = all / max(h.count[h.bin], 1u);
    cut.ties = h.count[h.bin];
    if (for_mass && cut.each > 0)  // as few as reach the target
      cut.ties = min(cut.ties, (target - min(target, found) + cut.each - 1) / cut.each);
  }
  return cut;
}

// Copies the warp's tokens with a key of at least `likely`, in order, to `at` and following.
template <typename T>
__device__ void list_likely(const Row<T>& row, uint32_t likely, uint32_t at, T* listed,
                            int32_t* token_of) {
  constexpr int kWidth = kVec<T>, kTurn = 32 * kWidth, kAhead = 4;
  const bool aligned = reinterpret_cast<uintptr_t>(row.logits) % 16 == 0;
  const int first = row.begin + static_cast<int>(threadIdx.x % 32) * kWidth;
  for (int start = 0; row.begin + start < row.end; start += kAhead * kTurn) {
    Vec<T, kWidth> read[kAhead];
#pragma unroll
    for (int turn = 0; turn < kAhead; ++turn) {
      const int i = first + start + turn * kTurn;
      if (aligned && i + kWidth <= row.end) read[turn] = load<T, kWidth>(row.logits + i);
    }
#pragma unroll
    for (int turn = 0; turn < kAhead; ++turn) {
      const int i = first + start + turn * kTurn;
      if (!aligned || i + kWidth > row.end)
        for (int k = 0; k < kWidth && i + k < row.end; ++k) read[turn].data[k] = row.logits[i + k];
      uint32_t own = 0;
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        own |= (i + k < row.end && key_of(read[turn].data[k]) >= likely ? 1u : 0u) << k;
      const uint32_t here = warp_scan(static_cast<uint32_t>(__popc(own)));
      uint32_t place = at + here - __popc(own);
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        if (own >> k & 1) listed[place] = read[turn].data[k], token_of[place++] = i + k;
      at += __shfl_sync(~0u, here, 31);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sample_kernel(SampleParams p) {
  extern __shared__ uint4 raw[];
  T* listed = reinterpret_cast<T*>(raw);  // [kListed], if any row is sampled
  int32_t* token_of = reinterpret_cast<int32_t*>(listed + kListed);  // [kListed]
  __shared__ Histogram h;
  __shared__ float best_of[kWarps], least_of[kWarps];
  __shared__ int index_of[kWarps];
  pdl_wait();
  pdl_launch_dependents();
  const int r = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SlotState& state = p.states[p.slots[r]];
  const int64_t number =
      state.num_generated + (p.drafts_before != nullptr ? p.drafts_before[r] : 0);
  constexpr int kTurn = 32 * kVec<T>, kBits = 8 * sizeof(T);
  Row<T> row{static_cast<const T*>(p.logits) + static_cast<int64_t>(r) * p.stride, 0, 0, 0, 0};

  float best = -INFINITY;
  int index = 0x7fffffff;
  bool finite = true;
  auto keep = [&](float x, int at) {
    if (x > best || (x == best && at < index)) best = x, index = at;
  };
  for_each<kThreads>(row.logits, 0, p.vocab, [&](T x, int at) {
    if (to_float(x) > best) best = to_float(x), index = at;
    finite = finite && to_float(x) < INFINITY;  // false for NaN; -inf is a masked token
  });
  // The minimum of the maxima of `together` threads each: at least `likely_count` tokens are as
  // likely.
  const float temperature = state.temperature;
  const int top_k = state.top_k < p.vocab ? state.top_k : 0;
  const int together = temperature <= 0 || top_k > kThreads / 2 ? 1
                       : top_k == 0 || top_k > kThreads / 4     ? 2
                                                                : 4;
  const int likely_count = kThreads / together;
  float least = best;
  for (int mask = 1; mask < together; mask <<= 1)
    least = fmaxf(least, __shfl_xor_sync(~0u, least, mask));
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) least = fminf(least, __shfl_xor_sync(~0u, least, mask));
#pragma unroll
  for (int mask = 16; mask; mask >>= 1)
    keep(__shfl_xor_sync(~0u, best, mask), __shfl_xor_sync(~0u, index, mask));
  if (lane == 0) best_of[warp] = best, index_of[warp] = index, least_of[warp] = least;
  if (__syncthreads_or(!finite)) {
    if (threadIdx.x == 0) p.tokens[r] = kNotFinite;
    return;
  }
  best = best_of[lane], index = index_of[lane], least = least_of[lane];
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    keep(__shfl_xor_sync(~0u, best, mask), __shfl_xor_sync(~0u, index, mask));
    least = fminf(least, __shfl_xor_sync(~0u, least, mask));
  }
  if (temperature <= 0 || index == 0x7fffffff) {
    if (threadIdx.x == 0) p.tokens[r] = index == 0x7fffffff ? p.none : index;
    return;
  }
  row.peak = best;
  row.scale = kLog2E / temperature;
  row.divide(p.vocab);

  // What the cuts can leave, as far as known in advance: `narrow`, likely tokens only; the smallest
  // key after min_p; the probability that top_p refers to.
  const uint32_t likely = key_of(from_float<T>(least));
  const float top_p = state.top_p, min_p = state.min_p, typical_p = state.typical_p;
  auto part_of = [](float part, uint64_t mass) {
    return max(static_cast<uint64_t>(static_cast<double>(part) * static_cast<double>(mass)),
               uint64_t{1});
  };
  uint32_t lowest = 0;
  if (min_p > 0) {
    const float edge = __double2float_ru(best + log(static_cast<double>(min_p)) * temperature);
    const T near = from_float<T>(edge);
    lowest = key_of(near) + (to_float(near) < edge ? 1 : 0);
  }
  const bool few = top_k > 0 && top_k <= likely_count;
  bool by_mass = top_p < 1, narrow = few || (lowest >= likely && !(top_k > 0 && by_mass));
  uint64_t whole = 0;
  uint32_t count = 0;  // likely tokens of the thread
  if (top_k == 0 && by_mass) {
    uint64_t mass = 0, likely_mass = 0, enough;
    row.for_each([&](T x, int) {
      const uint32_t own = row.probability(x);
      mass += own;
      if (key_of(x) >= likely) likely_mass += own, ++count;
    });
    scan_warps(warp_total(mass), h.warps, whole);
    scan_warps(warp_total(likely_mass), h.warps, enough);
    if (part_of(top_p, whole) <= enough) narrow = true;
    else if (narrow)  // top_p keeps all likely tokens, and min_p no others
      by_mass = false;
  } else if (narrow) {
    row.for_each([&](T x, int) { count += key_of(x) >= likely; });
  }
  const int32_t* tokens = nullptr;
  if (narrow) {
    uint64_t size;
    const auto at = static_cast<uint32_t>(scan_warps(warp_total(count), h.warps, size));
    if (size <= kListed) {
      list_likely(row, likely, at, listed, token_of);
      __syncthreads();
      row.logits = listed;
      row.divide(static_cast<int>(size));
      tokens = token_of;
    }
  }

  const uint32_t floor = narrow ? likely : 0;
  auto key = [](T x) { return key_of(x); };
  Cut cut{0, static_cast<uint64_t>(p.vocab), 0, 0};
  if (top_k > 0) {
    cut = find_cut<kBits>(row, h, top_k, false, key, [&](T x) { return key_of(x) >= floor; });
    whole = cut.above + cut.ties * cut.each;
  }
  if (by_mass) {
    const uint32_t from = max(floor, cut.key);
    cut = find_cut<kBits>(row, h, part_of(top_p, whole), true, key,
                          [&](T x) { return key_of(x) >= from; });
  }
  if (lowest > cut.key)
    cut = {lowest, static_cast<uint64_t>(p.vocab), 0, row.probability(logit_of<T>(lowest))};

  // Distance of the information from the entropy, in bits relative to the most likely token.
  float entropy = 0;
  uint32_t nearest = 0;  // the smallest key that is typical
  auto nearness = [&](T x) { return ~__float_as_uint(fabsf(row.logarithm(x) - entropy)); };
  if (typical_p < 1) {
    uint64_t mass = 0, ties = 0, all;
    double information = 0;
    row.for_each([&](T x, int) {
      const uint32_t key = key_of(x), own = key < cut.key ? 0 : row.probability(x);
      if (key == cut.key) ++ties;
      if (key <= cut.key || own == 0) return;
      mass += own;
      information += static_cast<double>(own) * row.logarithm(x);
    });
    scan_warps(warp_total(ties), h.warps, all);
    scan_warps(warp_total(mass), h.warps, whole);
    information = block_total(information, reinterpret_cast<double*>(h.warps));
    const T tie = logit_of<T>(cut.key);
    Lump lump{0, min(all, cut.ties), 0};
    if (lump.count > 0 && cut.each > 0) {
      lump.mass = lump.count * cut.each;
      whole += lump.mass;
      information += static_cast<double>(lump.mass) * row.logarithm(tie);
    } else {
      lump.count = 0;
    }
    entropy = static_cast<float>(information / static_cast<double>(whole));
    lump.key = nearness(tie);
    nearest = find_cut<32>(
                  row, h, part_of(typical_p, whole), true, nearness,
                  [&](T x) { return key_of(x) > cut.key; }, lump)
                  .key;
    if (lump.key < nearest) cut.ties = 0;
  }
  auto above = [&](T x) { return key_of(x) > cut.key && (nearest == 0 || nearness(x) >= nearest); };

  // Each warp's share of the kept probability; ties are kept in the order of tokens.
  uint64_t mass = 0, ties = 0, all, total;
  row.for_each([&](T x, int) {
    if (above(x)) mass += row.probability(x);
    if (key_of(x) == cut.key) ++ties;
  });
  ties = warp_total(ties);
  const uint64_t ties_before = scan_warps(ties, h.warps, all);
  const uint64_t kept_ties = min(ties, cut.ties - min(cut.ties, ties_before));
  mass = warp_total(mass) + kept_ties * cut.each;
  const uint64_t before = scan_warps(mass, h.warps, total);
  const uint64_t draw = __umul64hi(philox(state.seed, number), total);
  if (draw < before || draw >= before + mass) return;

  // The sampled token is in this warp.
  uint64_t passed = before, tied = ties_before;
  for (int start = row.begin; start < row.end; start += kTurn) {
    const int i = start + lane * kVec<T>;
    uint64_t own = 0, own_ties = 0;
    for (int k = 0; k < kVec<T> && i + k < row.end; ++k)
      own_ties += key_of(row.logits[i + k]) == cut.key;
    const uint64_t ties_here = warp_scan(own_ties);
    uint64_t tie = tied + ties_here - own_ties;
    auto part = [&](T x) -> uint64_t {
      if (key_of(x) == cut.key ? tie++ < cut.ties : above(x)) return row.probability(x);
      return 0;
    };
    for (int k = 0; k < kVec<T> && i + k < row.end; ++k) own += part(row.logits[i + k]);
    const uint64_t here = warp_scan(own), at_end = passed + __shfl_sync(~0u, here, 31);
    uint64_t at = passed + here - own;
    if (draw < at_end) {  // one lane has it
      if (draw < at || draw >= at + own) return;
      tie = tied + ties_here - own_ties;
      for (int k = 0; k < kVec<T> && i + k < row.end; ++k) {
        at += part(row.logits[i + k]);
        if (draw < at) {
          p.tokens[r] = tokens != nullptr ? tokens[i + k] : i + k;
          return;
        }
      }
    }
    passed = at_end;
    tied += __shfl_sync(~0u, ties_here, 31);
  }
}

}  // namespace

cudaError_t sample(DType dtype, const SampleParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kBytes = kListed * (sizeof(T) + sizeof(int32_t));
    const cudaError_t allowed =
        p.draws ? cudaFuncSetAttribute(sample_kernel<T>,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)
                : cudaSuccess;
    if (allowed != cudaSuccess) return allowed;
    return launch(sample_kernel<T>, p.rows, kThreads, p.draws ? kBytes : 0, stream, p);
  });
}

}  // namespace llmc::kernels
