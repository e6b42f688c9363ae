// Parts of the integer GEMV: shared memory, the quantization of x, the producer of weights and the
// epilogue.
#pragma once

#include "../common/cluster.cuh"
#include "../common/dequantize.cuh"
#include "gemv.cuh"

namespace llmc::kernels::integer {

using namespace device;
using device::cp_async;

__host__ __device__ constexpr int stages(int m) {
  return m == 2 ? 4 : 6;
}  // vectors in flight per warp
constexpr float kMaxQuantized = 127 * 256;

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

// [kDeep][kRows][kThreads], then scales [kDeep][kWarps][8][kRows]; see SharedLayout.
extern __shared__ uint4 ring[];

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

// Epilogue: reduces a tile over the warps, and over the blocks of a cluster, and writes its
// outputs. `turn` counts the block's tiles. Refers to variables of the kernel, like a lambda:
// copies of them are other machine code.
template <typename T, CodeType kCodeType, int kWarps, int kM>
struct Epilogue {
  static constexpr int kThreads = kWarps * 32;

  // Sum of an output over all warps, and of its up, in the tile of this turn.
  __device__ __forceinline__ void sum_up(int turn, int column, int row, float& value,
                                         float& up) const {
    const float* from =
        partial +
        (turn % 2 * kWarps * 16 * kM + column / height * 16 + column % height) * layout.pitch + row;
    value = up = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w, from += 16 * kM * layout.pitch) {
      value += from[0];
      if (p.gated) up += from[8 * layout.pitch];
    }
  }
  __device__ __forceinline__ void write(int tile, int column, int row, float value, float up,
                                        float total, float squares) const {
    const int output = tile * outputs + column;
    if (output >= p.out) return;
    const int64_t place = static_cast<int64_t>(row) * p.out + output;
    const float added =
        p.residual != nullptr ? to_float(static_cast<const T*>(p.residual)[place]) : 0.f;
    value = epilogue<T>(p, value, up, total, squares, row, output, p.gated, p.norm);
    OutputWriter<T>(p.y, p.y_scale_inverse).write(place, value + added);
  }
  __device__ __forceinline__ void finish(int tile, int turn) const {
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
  }
  // Sends the block's sums, ups and moments to the owner of the tile.
  __device__ __forceinline__ void send_sums(int turn) const {
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
  }
  __device__ __forceinline__ void finish_received(int tile, int turn) const {
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
  }

  const GemvParams& p;
  const SharedLayout<kCodeType>& layout;
  float* const& partial;
  const int &height, &outputs;
  const float (&moments)[kWarps][kIntegerRows][2];
  const int &parts, &part;
  float* const& received;
  const int &message, &sums;
  const Mbarrier& received_barrier;
};

// Producer cursor: the next vector that a thread copies. A lane copies one scale, of a row and a g.
template <int kRows>
struct WeightCursor {
  int tile, vector, slot;
  const uint8_t* rows[kRows];
  const float* scale;
};

// Producer: cp.async copies run ahead of the mma, over tiles and vectors. Refers to variables of
// the kernel, like Epilogue.
template <CodeType kCodeType, int kWarps, int kM, typename RowOf, typename GroupOf>
struct Producer {
  static constexpr int kThreads = kWarps * 32, kRows = 2 * kM, kDeep = stages(kM);

  __device__ __forceinline__ void find_rows() const {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      ahead.rows[row] =
          static_cast<const uint8_t*>(p.weight) + 16 * t +
          static_cast<uint64_t>(static_cast<uint32_t>(row_of(ahead.tile, row, g))) * row_bytes;
    ahead.scale = quant.scale + row_of(ahead.tile, lane % kRows, lane / kRows % 8);
  }
  __device__ __forceinline__ void copy_vector() const {
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
  }

  WeightCursor<kRows>& ahead;
  const GemvParams& p;
  const int& t;
  const RowOf& row_of;
  const int& g;
  const uint32_t& row_bytes;
  const QuantParams& quant;
  const int &lane, &tiles, &first_vector, &end_byte;
  float* const& scales;
  const GroupOf& group_of;
  const int &all_rows, &turns, &warp, &stride;
};

}  // namespace llmc::kernels::integer
