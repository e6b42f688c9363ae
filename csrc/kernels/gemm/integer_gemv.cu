// packed_gemv() by integer tensor cores. Codes are mma operands after a mask and a shift.
// Dequantizing to 16 bits takes about twice the instructions, and instructions are the limit.
//
// x is quantized to 16-bit integers with a scale per vector of columns: within 2^-16 of the
// vector's maximum, where T itself rounds by 2^-9 or 2^-12. The integer q = 256 high + low occupies
// two columns of the operand as two bytes, so 8 columns hold four rows of x, and integer sums are
// exact. Each block quantizes x itself, to shared memory, while its first weights are in flight.
//
// A warp takes 16 kM weight rows. A thread has rows g, g + 8, ... A vector is 64 bytes of a
// row, a quarter of them each thread's. The warps of a block take vectors in turn. Vectors and
// their scales are in flight stages() ahead.
//
// kClusterSplit: the blocks of a cluster split K. Each quantizes its own columns only, and there
// are more blocks than tiles. Sums are sent to one block, another for each tile, which adds them in
// rank order when all have arrived while the others take the next tile.
#include "../common/cluster.cuh"
#include "../common/dequantize.cuh"
#include "gemv.cuh"

namespace llmc::kernels {
namespace {

using namespace device;
using device::cp_async;

__host__ __device__ constexpr int stages(int m) {
  return m == 2 ? 4 : 6;
}  // vectors in flight per warp
constexpr float kMaxQuantized = 127 * 256;
constexpr int kMaxClusterSize = 4;  // blocks that split K

// Starts a copy of one float to shared memory.
__device__ __forceinline__ void cp_async(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(to)), "l"(from)
               : "memory");
}

// kSigned: codes are signed, as x is.
template <bool kSigned>
__device__ __forceinline__ void mma_m16n8k32(int (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (kSigned)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <CodeType kCodeType>
constexpr int kColumns = 512 / kBits<kCodeType>;  // of a vector
template <CodeType kCodeType>
constexpr int kSteps = kColumns<kCodeType> / 32;  // mma of a vector
template <CodeType kCodeType>
constexpr int kHalves = kSteps<kCodeType> / 2;  // 16-byte vectors of x for two mma each

// Shared memory of a block, in bytes: the ring and its scales; the quantized x; scale and sum per
// vector and row of x; partial sums of two tiles, [2][warps][16 m][pitch]; sums received from the
// cluster.
template <CodeType kCodeType>
struct SharedLayout {
  int vectors, used;  // vectors: of the block; used: operand columns that are not zero
  int pitch;
  int64_t operands, factors, partial, received, all;

  __host__ __device__ SharedLayout(int rows, int in, int warps, int m, int parts) {
    const int in_all = (in + kColumns<kCodeType> - 1) / kColumns<kCodeType>;
    vectors = (in_all + parts - 1) / parts;
    used = 2 * rows;
    pitch = rows <= 2 ? 3 : 5;
    operands = int64_t{stages(m)} * warps * m * (2 * 32 * 16 + 64);
    factors = operands + int64_t{vectors} * kHalves<kCodeType> * used * 64;
    partial = factors + int64_t{vectors} * rows * 8;
    received = partial + int64_t{2} * warps * 16 * m * pitch * 4;
    all = received + (parts > 1 ? parts * message(rows, m) * 4 : 0);
  }
  // Floats that a block sends for a tile: sums, and moments of x.
  static __host__ __device__ int message(int rows, int m) { return 16 * m * rows + 2 * rows; }
};

// Quantizes columns [first, end) of x, by all warps: operands, scales (factors) and, for a norm,
// each warp's moments. kSums: factors contain integer sums; otherwise they are for codes 16 times
// as large. Calls pdl_wait(). A lane takes eight columns of several vectors at once, without
// branches, so that no load waits for another.
template <typename T, CodeType kCodeType, int kWarps, bool kSums>
__device__ __forceinline__ void quantize_x(const GemvParams& p,
                                           const SharedLayout<kCodeType>& layout, int first,
                                           int end, uint32_t* operands, float2* factors,
                                           float (*moments)[kIntegerRows][2]) {
  constexpr int kLanes = kColumns<kCodeType> / 8, kAtOnce = 32 / kLanes,
                kBatch = 4;  // lanes per vector; vectors per warp; iterations per batch
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = lane % kLanes;
  // A warp takes some vectors of each row in turn; its loads run ahead, also into the next rows.
  const int each = (layout.vectors + kWarps * kAtOnce - 1) / (kWarps * kAtOnce),
            pairs = each * p.rows;
  struct VectorCursor {
    int row, turn;
  } ahead{}, now{};
  auto vector_of = [&](int turn) { return (turn * kWarps + warp) * kAtOnce + lane / kLanes; };
  auto column_of = [&](int turn) {
    return first + vector_of(turn) * kColumns<kCodeType> + own * 8;
  };
  auto go_on = [&](VectorCursor& place) {
    if (++place.turn == each) place.turn = 0, ++place.row;
  };
  Vec<float, 4> weights[kBatch][2];  // of the norm
  auto load_weights = [&](VectorCursor place) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i, go_on(place)) {
      const int column = column_of(place.turn);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weights[i][half] = {{1, 1, 1, 1}};
        if (p.norm_weight != nullptr && column < end)
          weights[i][half] = load<float, 4>(p.norm_weight + column + 4 * half);
      }
    }
  };
  load_weights(ahead);
  pdl_wait();
  pdl_launch_dependents();

  float of_row[2] = {};
  for (int begin = 0; begin < pairs; begin += kBatch) {
    if (begin > 0) load_weights(ahead);
    Vec<T, 8> eights[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i, go_on(ahead)) {
      const int column = column_of(ahead.turn);
      eights[i] = {};
      if (ahead.row < p.rows && column < end)
        eights[i] = load<T, 8>(static_cast<const T*>(p.x) + int64_t{ahead.row} * p.in + column);
    }
    float totals[kBatch], squares[kBatch];
    VectorCursor place = now;
#pragma unroll
    for (int i = 0; i < kBatch; ++i, go_on(place)) {
      const int row = place.row, vector = vector_of(place.turn);
      float x[8];
      totals[i] = squares[i] = 0;
      uint32_t most = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        x[k] = to_float(eights[i].data[k]);
        totals[i] += x[k], squares[i] = fmaf(x[k], x[k], squares[i]);
        x[k] *= weights[i][k / 4].data[k % 4];
        most = max(most, __float_as_uint(fabsf(x[k])));
      }
      // Maximum of the bit patterns: NaN compares greater than every number, and makes the scale
      // and all products NaN.
#pragma unroll
      for (int other = kLanes / 2; other > 0; other /= 2)
        most = max(most, __shfl_xor_sync(~0u, most, other));
      const float largest = __uint_as_float(most);
      const bool counts = largest > 1e-30f && largest < INFINITY;
      const float by = counts ? __fdividef(kMaxQuantized / 256, largest / 256)
                              : 0.f;  // __fdividef() takes divisors up to 2^126
      // Bits 0 to 15 of these are q + 128: the high byte is the operand's high byte, the low byte
      // is 128 more than its low byte.
      uint32_t bits[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) bits[k] = __float_as_uint(fmaf(x[k], by, 12582912.f + 128.f));
      // In the order of codes in words: 4 bits: columns 0, 4, 1, 5 and 2, 6, 3, 7; 8 bits: 0, 2, 4,
      // 6 and 1, 3, 5, 7.
      uint2 high, low;
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        constexpr bool kFour = kCodeType == CodeType::kInt4;
        const uint32_t a = bits[kFour ? 2 * word : word], b = bits[kFour ? 4 + 2 * word : word + 2];
        const uint32_t c = bits[kFour ? 1 + 2 * word : word + 4],
                       d = bits[kFour ? 5 + 2 * word : word + 6];
        const uint32_t left = __byte_perm(a, b, 0x5140),
                       right = __byte_perm(c, d, 0x5140);  // low bytes, then high bytes
        (word == 0 ? low.x : low.y) = __byte_perm(left, right, 0x5410) ^ 0x80808080;
        (word == 0 ? high.x : high.y) = __byte_perm(left, right, 0x7632);
      }
      int sum = 0;
      if constexpr (kSums) {
        sum = __dp4a(static_cast<int>(high.x), 0x01010101,
                     __dp4a(static_cast<int>(high.y), 0x01010101, 0)) *
              256;
        sum = __dp4a(static_cast<int>(low.x), 0x01010101,
                     __dp4a(static_cast<int>(low.y), 0x01010101, sum));
#pragma unroll
        for (int other = kLanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      }
      const int t = own / (kLanes / 4), step = own % (kLanes / 4);
      const int64_t at =
          ((int64_t{vector} * kHalves<kCodeType> + step / 2) * layout.used + row * 2) * 16 + t * 4 +
          step % 2 * 2;
      if (row < p.rows && vector < layout.vectors) {
        *reinterpret_cast<uint2*>(operands + at) = high;
        *reinterpret_cast<uint2*>(operands + at + 16) = low;
        constexpr float kScale = 1.f / kMaxQuantized / (kSums ? 1 : 16);
        if (own == 0)
          factors[vector * p.rows + row] = {counts || largest <= 1e-30f ? largest * kScale : NAN,
                                            __int_as_float(sum)};
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      of_row[0] += totals[i], of_row[1] += squares[i];
      const int row = now.row;
      go_on(now);
      if (!p.norm || now.row == row || row >= p.rows) continue;
      const float total = warp_sum(of_row[0]), sum = warp_sum(of_row[1]);
      if (lane == 0) moments[warp][row][0] = total, moments[warp][row][1] = sum;
      of_row[0] = of_row[1] = 0;
    }
  }
}

// kUneven: groups have zeros or minima.
template <typename T, CodeType kCodeType, int kWarps, int kM, bool kUneven, bool kClusterSplit>
__global__ void __launch_bounds__(kWarps * 32, (kM == 1 ? 24 : 16) / kWarps)
    integer_gemv_kernel(GemvParams p) {
  constexpr int kThreads = kWarps * 32, kRows = 2 * kM, kDeep = stages(kM);
  constexpr bool kSigned =
      kCodeType == CodeType::kInt4 && !kUneven;  // operands are then (code - 8) * 16
  extern __shared__ uint4
      ring[];  // [kDeep][kRows][kThreads], then scales [kDeep][kWarps][8][kRows]; see SharedLayout
  __shared__ float moments[kWarps][kIntegerRows][2];
  __shared__ uint64_t received_barrier_storage;
  const int parts = kClusterSplit ? cluster_size() : 1, part = kClusterSplit ? cluster_rank() : 0;
  const int begin = blockIdx.x / parts, stride = gridDim.x / parts;  // over tiles
  const SharedLayout<kCodeType> layout(p.rows, p.in, kWarps, kM, parts);
  auto* const shared = reinterpret_cast<unsigned char*>(ring);
  const auto* operands = reinterpret_cast<const uint4*>(shared + layout.operands);
  auto* const factors = reinterpret_cast<float2*>(shared + layout.factors);
  auto* const partial = reinterpret_cast<float*>(shared + layout.partial);
  auto* const received = reinterpret_cast<float*>(shared + layout.received);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto* const scales = reinterpret_cast<float*>(ring + kDeep * kRows * kThreads) + warp * kRows * 8;
  const int height = p.gated ? 8 : 16, outputs = height * kM,
            tiles = (p.out + outputs - 1) / outputs;
  const int first_vector = part * layout.vectors, first_column = first_vector * kColumns<kCodeType>;
  const int end_column = min(p.in, first_column + layout.vectors * kColumns<kCodeType>);
  const int turns = (layout.vectors + kWarps - 1) / kWarps;
  const auto row_bytes = static_cast<uint32_t>(p.in) * kBits<kCodeType> / 8;
  const int end_byte = end_column * kBits<kCodeType> / 8;
  const Mbarrier received_barrier{smem_address(&received_barrier_storage)};
  const int sums = outputs * p.rows * (p.gated ? 2 : 1), message = sums + (p.norm ? 2 * p.rows : 0);
  if (kClusterSplit) {
    if (threadIdx.x == 0) {
      received_barrier.init(1);
      received_barrier.arrive_expect_tx(parts * message * 4);
      fence_mbarrier_init();
    }
    cluster_arrive_relaxed();  // peers may send from now on
  }
  // Weight row `row` of a thread with this g. Rows beyond the last repeat it; their sums are not
  // written.
  auto row_of = [&](int tile, int row, int of_g) {
    const int low = (tile * kM + row / 2) * height + of_g;
    return row % 2 == 0 ? min(low, p.out - 1)
           : p.gated    ? p.out + min(low, p.out - 1)
                        : min(low + 8, p.out - 1);
  };
  const QuantParams& quant = p.quant;
  const int all_rows = p.gated ? 2 * p.out : p.out, groups = p.in / quant.group_size;
  const int per_group = quant.group_size / kColumns<kCodeType>;  // in vectors
  const uint32_t share = ((1u << 20) + per_group - 1) / per_group;
  const bool has_minima = kUneven && quant.minimum != nullptr;
  auto group_of = [&](int vector) {
    return min(static_cast<int>(vector * share >> 20), groups - 1);
  };

  // Producer cursor: cp.async copies run ahead of the mma, over tiles and vectors. A lane copies
  // one scale, of a row and a g.
  struct {
    int tile, vector, slot;
    const uint8_t* rows[kRows];
    const float* scale;
  } ahead{begin, warp, 0, {}, nullptr};
  auto find_rows = [&] {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      ahead.rows[row] =
          static_cast<const uint8_t*>(p.weight) + 16 * t +
          static_cast<uint64_t>(static_cast<uint32_t>(row_of(ahead.tile, row, g))) * row_bytes;
    ahead.scale = quant.scale + row_of(ahead.tile, lane % kRows, lane / kRows % 8);
  };
  auto copy_vector = [&] {
    if (ahead.tile < tiles) {
      const int at = 64 * (first_vector + ahead.vector);
      const bool there = at + 16 * t < end_byte;
      uint4* to = ring + ahead.slot * kRows * kThreads + threadIdx.x;
      const int from = there ? at : 0;
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        cp_async(to + row * kThreads, ahead.rows[row] + from, there);
      if (kRows == 4 || lane < 8 * kRows)
        cp_async(scales + ahead.slot * kWarps * kRows * 8 + lane,
                 ahead.scale + static_cast<uint32_t>(group_of(first_vector + ahead.vector)) *
                                   static_cast<uint64_t>(all_rows));
      ahead.slot = ahead.slot + 1 == kDeep ? 0 : ahead.slot + 1;
      ahead.vector += kWarps;
      if (ahead.vector >= turns * kWarps) {
        ahead.vector = warp;
        ahead.tile += stride;
        find_rows();
      }
    }
    cp_async_commit();
  };
  find_rows();
  for (int i = 0; i < kDeep; ++i) copy_vector();  // weights do not depend on the previous kernel

  quantize_x<T, kCodeType, kWarps, !kSigned>(p, layout, first_column, end_column,
                                             reinterpret_cast<uint32_t*>(shared + layout.operands),
                                             factors, moments);
  __syncthreads();
  if (kClusterSplit) cluster_wait();

  // Sum of an output over all warps, and of its up, in the tile of this turn.
  auto sum_up = [&](int turn, int column, int row, float& value, float& up) {
    const float* from =
        partial +
        (turn % 2 * kWarps * 16 * kM + column / height * 16 + column % height) * layout.pitch + row;
    value = up = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w, from += 16 * kM * layout.pitch) {
      value += from[0];
      if (p.gated) up += from[8 * layout.pitch];
    }
  };
  auto write = [&](int tile, int column, int row, float value, float up, float total,
                   float squares) {
    const int output = tile * outputs + column;
    if (output >= p.out) return;
    const int64_t place = static_cast<int64_t>(row) * p.out + output;
    const float added =
        p.residual != nullptr ? to_float(static_cast<const T*>(p.residual)[place]) : 0.f;
    value = epilogue<T>(p, value, up, total, squares, row, output, p.gated, p.norm);
    OutputWriter<T>(p.y, p.y_scale_inverse).write(place, value + added);
  };
  auto finish = [&](int tile, int turn) {
    // Other warps come first in each tile.
    for (int i = (threadIdx.x + turn * 64) % kThreads; i < outputs * p.rows; i += kThreads) {
      const int column = i % outputs, row = i / outputs;
      float value, up, total = 0, squares = 0;
      sum_up(turn, column, row, value, up);
      if (p.norm)
#pragma unroll
        for (int w = 0; w < kWarps; ++w) total += moments[w][row][0], squares += moments[w][row][1];
      write(tile, column, row, value, up, total, squares);
    }
  };
  // Sends the block's sums, ups and moments to the owner of the tile.
  auto send_sums = [&](int turn) {
    const int owner = turn % parts;
    float* const to = received + part * message;
    for (int i = threadIdx.x; i < outputs * p.rows; i += kThreads) {
      float value, up;
      sum_up(turn, i % outputs, i / outputs, value, up);
      st_async(to + i, received_barrier, owner, value);
      if (p.gated) st_async(to + outputs * p.rows + i, received_barrier, owner, up);
    }
    for (int i = threadIdx.x; p.norm && i < 2 * p.rows; i += kThreads) {
      float of_warps = 0;
      for (int w = 0; w < kWarps; ++w) of_warps += moments[w][i / 2][i % 2];
      st_async(to + sums + i, received_barrier, owner, of_warps);
    }
  };
  auto finish_received = [&](int tile, int turn) {
    if (turn % parts != part) return;
    received_barrier.wait(turn / parts % 2);
    for (int i = threadIdx.x; i < outputs * p.rows; i += kThreads) {
      const int column = i % outputs, row = i / outputs;
      float value = 0, up = 0, total = 0, squares = 0;
      for (int from = 0; from < parts; ++from) {
        const float* sum = received + from * message;
        value += sum[i];
        if (p.gated) up += sum[outputs * p.rows + i];
        if (p.norm) total += sum[sums + 2 * row], squares += sum[sums + 2 * row + 1];
      }
      write(tile, column, row, value, up, total, squares);
    }
    __syncthreads();  // no peer sends more before this block has sent the next tile
    if (threadIdx.x == 0) received_barrier.arrive_expect_tx(parts * message * 4);
  };

  int slot = 0, turn = 0, tile = begin;
  uint32_t x[kHalves<kCodeType>][4] = {};  // unused columns stay zero
  for (; tile < tiles; tile += stride, ++turn) {
    float total[kRows] = {};
    const uint4* own = operands + (warp * kHalves<kCodeType> * layout.used + g) * 4 + t;
    const float2* factor = factors + warp * p.rows + t;
    for (int step = 0; step < turns; ++step) {
      const int vector = warp + step * kWarps;
      cp_async_wait<kDeep - 1>();
      __syncwarp();
      const uint4* from = ring + slot * kRows * kThreads + threadIdx.x;
      uint32_t words[kRows][4];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const uint4 four = from[row * kThreads];
        words[row][0] = four.x, words[row][1] = four.y, words[row][2] = four.z,
        words[row][3] = four.w;
      }
      const auto scale = load<float, kRows>(scales + slot * kWarps * kRows * 8 + g * kRows);
      slot = slot + 1 == kDeep ? 0 : slot + 1;
      __syncwarp();  // the scales have been read
      copy_vector();
      if (vector >= layout.vectors) continue;

#pragma unroll
      for (int half = 0; half < kHalves<kCodeType>; ++half)
        if (g < layout.used) {
          const uint4 four = own[half * layout.used * 4];
          x[half][0] = four.x, x[half][1] = four.y, x[half][2] = four.z, x[half][3] = four.w;
        }
      own += kWarps * kHalves<kCodeType> * layout.used * 4;
      int sum[kM][4] = {};
#pragma unroll
      for (int j = 0; j < kSteps<kCodeType>; ++j)
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          uint32_t a[4];
          if constexpr (kSigned) {
            const uint32_t low = words[2 * m][j], high = words[2 * m + 1][j];
            a[0] = low * 16 & 0xf0f0f0f0 ^ 0x80808080, a[1] = high * 16 & 0xf0f0f0f0 ^ 0x80808080;
            a[2] = low & 0xf0f0f0f0 ^ 0x80808080, a[3] = high & 0xf0f0f0f0 ^ 0x80808080;
          } else if constexpr (kCodeType == CodeType::kInt4) {
            const uint32_t low = words[2 * m][j], high = words[2 * m + 1][j];
            a[0] = low & 0x0f0f0f0f, a[1] = high & 0x0f0f0f0f;
            a[2] = low >> 4 & 0x0f0f0f0f, a[3] = high >> 4 & 0x0f0f0f0f;
          } else {
            a[0] = words[2 * m][2 * j], a[1] = words[2 * m + 1][2 * j];
            a[2] = words[2 * m][2 * j + 1], a[3] = words[2 * m + 1][2 * j + 1];
          }
          mma_m16n8k32<kSigned>(sum[m], a, x[j / 2][j % 2 * 2], x[j / 2][j % 2 * 2 + 1]);
        }
      const int group = group_of(first_vector + vector);
      const float2 of_x = t < p.rows ? *factor : make_float2(0.f, 0.f);
      const int sum_of_x = __float_as_int(of_x.y);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        int all = sum[row / 2][row % 2 * 2] * 256 + sum[row / 2][row % 2 * 2 + 1];
        if constexpr (!kSigned) {
          const int zero = kUneven
                               ? load_zero<kCodeType>(quant, row_of(tile, row, g), group, groups)
                               : kDefaultZero<kCodeType>;
          all -= zero * sum_of_x;
        }
        total[row] = fmaf(static_cast<float>(all), of_x.x * scale.data[row], total[row]);
        if constexpr (kUneven) {
          const int64_t at = static_cast<int64_t>(group) * all_rows + row_of(tile, row, g);
          const float minimum = has_minima ? __ldg(quant.minimum + at) : 0.f;
          total[row] = fmaf(static_cast<float>(sum_of_x), of_x.x * minimum, total[row]);
        }
      }
      factor += kWarps * p.rows;
    }
    if (kClusterSplit && turn > 0) finish_received(tile - stride, turn - 1);
    if (t < p.rows)
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        partial[((turn % 2 * kWarps + warp) * 16 * kM + row * 8 + g) * layout.pitch + t] =
            total[row];
    __syncthreads();
    if constexpr (kClusterSplit) send_sums(turn);
    else finish(tile, turn);
  }
  if (kClusterSplit && turn > 0) finish_received(tile - stride, turn - 1);
}

// Warps of a block, tiles of 16 rows at once, blocks that split K, and the maximum number of blocks
// per SM.
struct KernelConfig {
  int warps, m, parts, blocks;
};

template <typename T, CodeType kCodeType, int kWarps, int kM, bool kUneven, bool kClusterSplit>
cudaError_t run(const GemvParams& p, const KernelConfig& config, cudaStream_t stream) {
  const size_t shared = SharedLayout<kCodeType>(p.rows, p.in, kWarps, kM, config.parts).all;
  const auto kernel = integer_gemv_kernel<T, kCodeType, kWarps, kM, kUneven, kClusterSplit>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  const int tiles = static_cast<int>(ceil_div(p.out, (p.gated ? 8 : 16) * kM));
  int clusters = 0;
  if constexpr (kClusterSplit) {
    const Launch all(config.parts, kWarps * 32, shared, stream, config.parts);
    cudaOccupancyMaxActiveClusters(&clusters, kernel, all.config());
  } else {
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters, kernel, kWarps * 32, shared);
    clusters *= static_cast<int>(num_sms());
  }
  const int most = config.blocks * static_cast<int>(num_sms()) / config.parts;
  const int grid = std::max(std::min({tiles, clusters, most}), 1) * config.parts;
  return cudaLaunchKernelEx(Launch(grid, kWarps * 32, shared, stream, config.parts).config(),
                            kernel, p);
}

// Tiles of 32 weight rows. Rows are long if there are fewer tiles than SMs and much of x to
// quantize.
unsigned tiles_of(const GemvParams& p) { return ceil_div(p.out, p.gated ? 16 : 32); }
bool has_long_rows(const GemvParams& p) { return tiles_of(p) <= num_sms() && p.in > 9000; }
bool has_many_tiles(const GemvParams& p) { return tiles_of(p) >= 4 * num_sms(); }

// The configuration that was fastest for Llama shapes, if shared memory suffices. No warps: x does
// not fit.
template <CodeType kCodeType>
KernelConfig choose_config(const GemvParams& p) {
  const int64_t most = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
  auto needs = [&](int warps, int m, int parts) {  // with static shared memory
    return SharedLayout<kCodeType>(p.rows, p.in, warps, m, parts).all + warps * 32 + 16;
  };
  const KernelConfig one{16, 1, 1, 1}, two{8, 2, 1, 2},
      cluster{8, 2, kMaxClusterSize, 2};  // the last field: blocks per SM
  const bool has_one = needs(16, 1, 1) <= most, has_two = 2 * (needs(8, 2, 1) + 1024) <= most;
  const bool has_cluster = device_attribute<cudaDevAttrComputeCapabilityMajor>() >= 9 &&
                           2 * (needs(8, 2, kMaxClusterSize) + 1024) <= most;
  if (has_one && kCodeType == CodeType::kInt8 && (p.rows > 2 || has_many_tiles(p))) return one;
  if (has_long_rows(p) && has_one && p.rows < 4) return one;
  if (has_long_rows(p) && has_cluster) return cluster;
  return has_two ? two : has_one ? one : KernelConfig{};
}

template <typename T, CodeType kCodeType, bool kUneven>
cudaError_t dispatch_config(const GemvParams& p, const KernelConfig& config, cudaStream_t stream) {
  if (config.parts > 1) return run<T, kCodeType, 8, 2, kUneven, true>(p, config, stream);
  return config.warps == 16 ? run<T, kCodeType, 16, 1, kUneven, false>(p, config, stream)
                            : run<T, kCodeType, 8, 2, kUneven, false>(p, config, stream);
}

template <typename T, CodeType kCodeType>
cudaError_t run_codes(const GemvParams& p, cudaStream_t stream) {
  const KernelConfig config = choose_config<kCodeType>(p);
  if (p.quant.zero != nullptr || p.quant.minimum != nullptr)
    return dispatch_config<T, kCodeType, true>(p, config, stream);
  return dispatch_config<T, kCodeType, false>(p, config, stream);
}

template <typename T>
cudaError_t run_type(const GemvParams& p, cudaStream_t stream) {
  return p.quant.code_type == CodeType::kInt4 ? run_codes<T, CodeType::kInt4>(p, stream)
                                              : run_codes<T, CodeType::kInt8>(p, stream);
}

}  // namespace

bool has_integer_gemv(const GemvParams& p) {
  const bool four = p.quant.code_type == CodeType::kInt4;
  if ((!four && p.quant.code_type != CodeType::kInt8) || p.rows > kIntegerRows || p.in % 32 != 0 ||
      p.out % 4 != 0 || !is_aligned(p.quant.scale, 16) || !is_aligned(p.norm_weight, 16))
    return false;
  if (p.quant.group_size % (four ? kColumns<CodeType::kInt4> : kColumns<CodeType::kInt8>) != 0)
    return false;
  // Quantizing more rows takes longer than it saves if a block has few tiles, except for long rows.
  if (p.rows > 2 && four && !has_long_rows(p) && !has_many_tiles(p)) return false;
  return (four ? choose_config<CodeType::kInt4>(p) : choose_config<CodeType::kInt8>(p)).warps != 0;
}

cudaError_t integer_gemv(DType dtype, const GemvParams& p, cudaStream_t stream) {
  if (!has_integer_gemv(p)) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
