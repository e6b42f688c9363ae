// Choose a token per row of logits: the likeliest, or one drawn from the softmax at a temperature, cut to the
// top_k likeliest and of these to the fewest that together have top_p of the probability.
//
// A block takes a row; warp w a contiguous segment of it, so that the order of tokens is the order of warps.
// Probabilities are integers, exp(x - max) · 2^31: sums do not depend on the order of atomics, and what is
// cut is exact but for tokens less likely than 2^-31 of the likeliest, which never appear. A cut is the
// largest key (bits of a logit, ordered as the logits are) at or above which enough tokens or probability
// lie; it is found digit by digit in histograms of the keys. The row is read 2 times without cuts, and once
// more per cut and digit: twice for 16-bit logits, three times for float32.
//
// The random number of a draw is Philox4x64-10 of the sequence's seed and the number of tokens it drew
// before, as numpy.random.Philox(key=seed, counter=drawn) makes it.
#include "device.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kThreads = 1024, kWarps = kThreads / 32, kDigit = 11, kBins = 1 << kDigit;

__device__ uint64_t philox(uint64_t seed, uint64_t counter) {
  uint64_t c0 = counter + 1, c1 = 0, c2 = 0, c3 = 0, k0 = seed, k1 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t m0 = 0xD2E7470EE14C6C93u, m1 = 0xCA5A826395121157u;
    const uint64_t high0 = __umul64hi(m0, c0), low0 = m0 * c0, high1 = __umul64hi(m1, c2), low1 = m1 * c2;
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B97F4A7C15u, k1 += 0xBB67AE8584CAA73Bu;
  }
  return c0;
}

// A logit's bits, ordered as the logits are.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
template <typename T>
__device__ __forceinline__ uint32_t key_of(T x) {
  const uint32_t bits = *reinterpret_cast<const uint16_t*>(&x);
  return bits >> 15 ? ~bits & 0xffffu : bits | 0x8000u;
}

// The sum of `value` over the warps before the caller's and, in `total`, over all; value is one per warp.
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

// Inclusive, over the lanes of a warp.
__device__ __forceinline__ uint64_t warp_scan(uint64_t x) {
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const uint64_t other = __shfl_up_sync(~0u, x, step);
    if (threadIdx.x % 32 >= step) x += other;
  }
  return x;
}

// What is kept of a row: keys above `key`, and the first `ties` tokens that have it.
struct Cut {
  uint32_t key;
  uint64_t ties, above, each;  // above: probability of the keys above; each: of one token that has the key
};

template <typename T>
struct Row {
  const T* logits;
  int vocab, begin, end;  // the warp's segment
  float peak, scale;      // the greatest logit; log2(e) / temperature

  __device__ __forceinline__ uint32_t probability(float x) const {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(fmaf(x, scale, 31 - peak * scale)));
    return __float2uint_rz(power);
  }

  // f(x, token), in turns of 32 lanes times kVec neighbouring tokens.
  template <typename F>
  __device__ void for_each(F&& f) const {
    constexpr int kWidth = kVec<T>;
    const bool whole = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
    for (int start = begin; start < end; start += 32 * kWidth) {
      const int i = start + static_cast<int>(threadIdx.x % 32) * kWidth;
      if (whole && i + kWidth <= end) {
        const auto v = load<T, kWidth>(logits + i);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) f(v.data[k], i + k);
      } else {
        for (int k = 0; k < kWidth && i + k < end; ++k) f(logits[i + k], i + k);
      }
    }
  }
};

struct Histogram {
  uint32_t count[kBins], low[kBins], high[kBins];  // high and low halves of the probability
  uint64_t warps[kWarps];
  uint32_t bin;
  uint64_t above, count_above;
};

// The greatest key at or above which `target` tokens (or, for_mass, as much probability) lie, among the keys
// from `floor` on.
template <typename T>
__device__ Cut find_cut(const Row<T>& row, Histogram& h, uint32_t floor, uint64_t target, bool for_mass) {
  Cut cut{};
  uint64_t found = 0;  // tokens, or probability, above the keys that begin with cut.key
  for (int shift = 8 * sizeof(T), bits; shift > 0;) {
    const int before = shift;
    bits = min(kDigit, shift);
    shift -= bits;
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kThreads) h.count[i] = h.low[i] = h.high[i] = 0;
    __syncthreads();
    row.for_each([&](T x, int) {
      const uint32_t key = key_of(x);
      if (key < floor || (before < 8 * static_cast<int>(sizeof(T)) && key >> before != cut.key)) return;
      const uint32_t bin = (key >> shift) & ((1u << bits) - 1);
      const uint32_t mass = row.probability(to_float(x));
      if (mass == 0 && for_mass) return;
      atomicAdd(&h.count[bin], 1u);
      const uint32_t old = atomicAdd(&h.low[bin], mass);
      if (old + mass < old) atomicAdd(&h.high[bin], 1u);
    });
    __syncthreads();
    // Thread i has the bins 2i and 2i + 1, counted from the highest.
    static_assert(kBins == 2 * kThreads);
    uint64_t mass[2], count[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int bin = kBins - 1 - (2 * threadIdx.x + k);
      mass[k] = (static_cast<uint64_t>(h.high[bin]) << 32) + h.low[bin], count[k] = h.count[bin];
    }
    uint64_t total_mass, total_count;
    const uint64_t mass_here = warp_scan(mass[0] + mass[1]), count_here = warp_scan(count[0] + count[1]);
    uint64_t mass_before =
        scan_warps(__shfl_sync(~0u, mass_here, 31), h.warps, total_mass) + mass_here - mass[0] - mass[1];
    uint64_t count_before =
        scan_warps(__shfl_sync(~0u, count_here, 31), h.warps, total_count) + count_here - count[0] - count[1];
    const uint64_t wanted = min(target - found, for_mass ? total_mass : total_count);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint64_t past = for_mass ? mass_before : count_before, own = for_mass ? mass[k] : count[k];
      if (past < wanted && wanted <= past + own)
        h.bin = kBins - 1 - (2 * threadIdx.x + k), h.above = mass_before, h.count_above = count_before;
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

template <typename T>
__global__ void __launch_bounds__(kThreads) sample_kernel(SampleParams p) {
  __shared__ Histogram h;
  __shared__ float best_of[kWarps], least_of[kWarps];
  __shared__ int index_of[kWarps];
  wait_for_inputs();
  let_next_start();
  const int r = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kTurn = 32 * kVec<T>;
  const int segment = (p.vocab + kWarps * kTurn - 1) / (kWarps * kTurn) * kTurn;
  Row<T> row{static_cast<const T*>(p.logits) + static_cast<int64_t>(r) * p.stride, p.vocab,
             min(p.vocab, warp * segment), min(p.vocab, (warp + 1) * segment), 0, 0};

  float best = -INFINITY;
  int index = 0x7fffffff;
  auto keep = [&](float x, int at) {
    if (x > best || (x == best && at < index)) best = x, index = at;
  };
  row.for_each([&](T x, int at) {
    if (to_float(x) > best) best = to_float(x), index = at;
  });
  float least = best;  // of the threads' greatest: at least kThreads tokens are as likely
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) least = fminf(least, __shfl_xor_sync(~0u, least, mask));
#pragma unroll
  for (int mask = 16; mask; mask >>= 1)
    keep(__shfl_xor_sync(~0u, best, mask), __shfl_xor_sync(~0u, index, mask));
  if (lane == 0) best_of[warp] = best, index_of[warp] = index, least_of[warp] = least;
  __syncthreads();
  best = best_of[lane], index = index_of[lane], least = least_of[lane];
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    keep(__shfl_xor_sync(~0u, best, mask), __shfl_xor_sync(~0u, index, mask));
    least = fminf(least, __shfl_xor_sync(~0u, least, mask));
  }
  if (p.temperature[r] <= 0 || index == 0x7fffffff) {
    if (threadIdx.x == 0) p.tokens[r] = index == 0x7fffffff ? 0 : index;
    return;
  }
  row.peak = best;
  row.scale = 1.44269504f / p.temperature[r];

  // Tokens below `likely` are left out of histograms where those from it on are enough.
  const uint32_t likely = key_of(from_float<T>(least));
  const int top_k = p.top_k[r];
  Cut cut{0, static_cast<uint64_t>(p.vocab), 0, 0};
  uint64_t whole, enough = 0;  // the probability that top_p is a part of, and what of it is likely
  if (top_k > 0 && top_k < p.vocab) {
    cut = find_cut(row, h, top_k <= kThreads ? likely : 0, top_k, false);
    whole = cut.above + cut.ties * cut.each;
  } else {
    uint64_t mass = 0, likely_mass = 0;
    row.for_each([&](T x, int) {
      const uint32_t own = row.probability(to_float(x));
      mass += own;
      if (key_of(x) >= likely) likely_mass += own;
    });
    scan_warps(warp_total(mass), h.warps, whole);
    scan_warps(warp_total(likely_mass), h.warps, enough);
  }
  if (p.top_p[r] < 1) {
    const auto target = static_cast<uint64_t>(static_cast<double>(p.top_p[r]) * static_cast<double>(whole));
    const uint32_t floor = target < enough ? max(likely, cut.key) : cut.key;
    cut = find_cut(row, h, floor, max(target, uint64_t{1}), true);
  }

  // Each warp's share of what is kept; ties are kept in the order of tokens.
  uint64_t mass = 0, ties = 0, all, total;
  row.for_each([&](T x, int) {
    const uint32_t key = key_of(x);
    if (key > cut.key) mass += row.probability(to_float(x));
    if (key == cut.key) ++ties;
  });
  ties = warp_total(ties);
  const uint64_t ties_before = scan_warps(ties, h.warps, all);
  const uint64_t kept_ties = min(ties, cut.ties - min(cut.ties, ties_before));
  mass = warp_total(mass) + kept_ties * cut.each;
  const uint64_t before = scan_warps(mass, h.warps, total);
  const uint64_t draw = __umul64hi(philox(p.seed[r], p.drawn[r]), total);
  if (draw < before || draw >= before + mass) return;

  // This warp has the token.
  uint64_t passed = before, tied = ties_before;
  for (int start = row.begin; start < row.end; start += kTurn) {
    const int i = start + lane * kVec<T>;
    uint64_t own = 0, own_ties = 0;
    for (int k = 0; k < kVec<T> && i + k < row.end; ++k) own_ties += key_of(row.logits[i + k]) == cut.key;
    const uint64_t ties_here = warp_scan(own_ties);
    uint64_t tie = tied + ties_here - own_ties;
    auto part = [&](T x) -> uint64_t {
      const uint32_t key = key_of(x);
      if (key < cut.key || (key == cut.key && tie++ >= cut.ties)) return 0;
      return row.probability(to_float(x));
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
          p.tokens[r] = i + k;
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
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(sample_kernel<T>, p.rows, kThreads, 0, stream, p);
  });
}

}  // namespace llmc::kernels
