// packed_gemv.cu's product by the tensor core's integers: codes are operands as they are, but for a mask and a shift of
// those of 4 bits, where numbers of 16 bits take about twice the instructions, which is what bounds it.
//
// x becomes integers of 15 bits, by a scale for each vector of its columns: no further from x than 2^-15 of the largest
// number there, where T itself rounds numbers by up to 2^-9 or 2^-12 of each. Two bytes hold it, q = 128 high + low, as two
// columns of the operand; so 8 columns take four rows of x, and sums of integers are exact. Each block makes them anew
// and keeps them in shared memory, while its first weights are under way.
//
// A warp takes 16 kM rows of the weight at a time, of which a thread has rows g, g + 8, … ; a vector is 64 bytes of a
// row, a quarter of them each thread's, and the block's warps take vectors in turn. Vectors and their scales are under
// way to shared memory stages() ahead.
#include "gemv.cuh"
#include "packed.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

__host__ __device__ constexpr int stages(int m) { return m == 2 ? 4 : 6; }  // vectors under way, of each warp
constexpr float kLargest = 127 * 128;

__device__ __forceinline__ void multiply_codes(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <Codes kCodes>
constexpr int kColumns = 512 / kBits<kCodes>;  // of a vector
template <Codes kCodes>
constexpr int kSteps = kColumns<kCodes> / 32;  // products of a vector
template <Codes kCodes>
constexpr int kHalves = kSteps<kCodes> / 2;    // 16 bytes of x for two of them

// Shared memory: the ring, the operands of x, and of each vector and row of x its scale and sum.
template <Codes kCodes>
struct Room {
  int vectors, used;  // columns of an operand that are not zero
  int64_t operands, factors, all;

  __host__ __device__ Room(int rows, int in, int warps, int m) {
    vectors = (in + kColumns<kCodes> - 1) / kColumns<kCodes>;
    used = 2 * rows;
    operands = int64_t{stages(m)} * warps * m * (2 * 32 * 16 + 64);
    factors = operands + int64_t{vectors} * kHalves<kCodes> * used * 64;
    all = factors + int64_t{vectors} * 4 * 8;
  }
};

// Of x, by all warps: operands, factors and, for a norm, what finish_tile wants to know of it.
template <typename T, Codes kCodes, int kWarps, int kMeasured>
__device__ __forceinline__ void make_operands(const GemvParams& p, const Room<kCodes>& room, uint32_t* operands,
                                              float2* factors, float (&measured)[kWarps][kMeasured][2]) {
  constexpr int kLanes = kColumns<kCodes> / 4;  // of a vector: a lane takes four columns
  constexpr int kAtOnce = 32 / kLanes, kBatch = 8;  // vectors; loads under way
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = lane % kLanes;
  const uint32_t mates = kAtOnce == 1 ? ~0u : 0xffffu << lane / 16 * 16;
  for (int i = threadIdx.x; i < room.vectors * (4 - p.rows); i += kWarps * 32)  // rows that are not there
    factors[i % room.vectors * 4 + p.rows + i / room.vectors] = {0.f, 0.f};
  // Of each row a warp takes some vectors, in turn; what it loads is ahead, of the next rows too.
  const int each = (room.vectors + kWarps * kAtOnce - 1) / (kWarps * kAtOnce), pairs = each * p.rows;
  struct {
    int row, turn;
  } ahead{}, now{};
  float of_row[2] = {};
  for (int begin = 0; begin < pairs; begin += kBatch) {
    Vec<T, 4> fours[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int column = ((ahead.turn * kWarps + warp) * kAtOnce) * kColumns<kCodes> + lane * 4;
#pragma unroll
      for (int k = 0; k < 4; ++k) fours[i].data[k] = from_float<T>(0.f);
      if (ahead.row < p.rows && column < p.in)
        fours[i] = load<T, 4>(static_cast<const T*>(p.x) + int64_t{ahead.row} * p.in + column);
      if (++ahead.turn == each) ahead.turn = 0, ++ahead.row;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (now.row == p.rows) break;
      const int row = now.row, vector = (now.turn * kWarps + warp) * kAtOnce + lane / kLanes;
      float x[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] = to_float(fours[i].data[k]);
      uint32_t most = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        most = max(most, __float_as_uint(fabsf(x[k])));
        of_row[0] += x[k], of_row[1] = fmaf(x[k], x[k], of_row[1]);
      }
      // As bits: what is no number is greater than all numbers, and makes the scale and what is multiplied by it no number.
      const float largest = __uint_as_float(__reduce_max_sync(mates, most));
      const bool counts = largest > 1e-30f && largest < INFINITY;
      const float by = counts ? kLargest / largest : 0.f;
      int sum = 0;
      uint32_t high = 0, low = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int q = __float2int_rn(x[k] * by), upper = (q + 64) >> 7;
        sum += q;
        high |= (upper & 0xff) << 8 * k, low |= (q - 128 * upper & 0xff) << 8 * k;
      }
      sum = __reduce_add_sync(mates, sum);
      const uint32_t other_high = __shfl_xor_sync(~0u, high, 1), other_low = __shfl_xor_sync(~0u, low, 1);
      if (vector < room.vectors && own == 0)
        factors[vector * 4 + row] = {counts || largest <= 1e-30f ? largest / kLargest : NAN, __int_as_float(sum)};
      // Of eight columns the even lane has the first four, and makes the first word of an operand, as codes lie: of 4 bits
      // columns 0, 4, 1, 5 and 2, 6, 3, 7, of 8 bits 0, 2, 4, 6 and 1, 3, 5, 7.
      constexpr bool kFour = kCodes == Codes::kFour;
      const bool odd = lane % 2;
      auto word_of = [&](uint32_t mine, uint32_t other) {
        return __byte_perm(odd ? other : mine, odd ? mine : other, kFour ? odd ? 0x7362 : 0x5140 : odd ? 0x7531 : 0x6420);
      };
      const int t = kFour ? own / 8 : own / 4, step = own % (kFour ? 8 : 4) / 2;
      const int64_t at = ((int64_t{vector} * kHalves<kCodes> + step / 2) * room.used + row * 2) * 16 +
                         t * 4 + step % 2 * 2 + odd;
      if (vector < room.vectors) {
        operands[at] = word_of(high, other_high);
        operands[at + 16] = word_of(low, other_low);
      }
      if (++now.turn < each) continue;
      if (p.norm) {
        const float total = warp_sum(of_row[0]), squares = warp_sum(of_row[1]);
        if (lane == 0) measured[warp][row][0] = total, measured[warp][row][1] = squares;
        of_row[0] = of_row[1] = 0;
      }
      now = {row + 1, 0};
    }
  }
}

// kUneven: groups have zeros or minima.
template <typename T, Codes kCodes, int kWarps, int kM, bool kUneven>
__global__ void __launch_bounds__(kWarps * 32, (kM == 1 ? 24 : 16) / kWarps) integer_gemv_kernel(GemvParams p) {
  constexpr int kThreads = kWarps * 32, kRows = 2 * kM, kDeep = stages(kM);
  extern __shared__ uint4 ring[];  // [kDeep][kRows][kThreads], then scales [kDeep][kWarps][kRows][8]
  __shared__ float partial[2][kM][kWarps][16][5];
  __shared__ float measured[kWarps][4][2];
  const Room<kCodes> room(p.rows, p.in, kWarps, kM);
  auto* const shared = reinterpret_cast<unsigned char*>(ring);
  const auto* operands = reinterpret_cast<const uint4*>(shared + room.operands);
  auto* factors = reinterpret_cast<float2*>(shared + room.factors);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto* const scales = reinterpret_cast<float*>(ring + kDeep * kRows * kThreads) + warp * kRows * 8;
  const int height = p.gated ? 8 : 16, tiles = (p.out + height * kM - 1) / (height * kM);
  const int turns = (room.vectors + kWarps - 1) / kWarps;
  const int64_t row_bytes = static_cast<int64_t>(p.in) * kBits<kCodes> / 8;
  // Rows beyond the last repeat it; their sums are not written.
  auto row_of = [&](int tile, int row) {
    const int low = (tile * kM + row / 2) * height + g;
    return row % 2 == 0 ? min(low, p.out - 1) : p.gated ? p.out + min(low, p.out - 1) : min(low + 8, p.out - 1);
  };
  const Packing& packing = p.packing;
  const int all_rows = p.gated ? 2 * p.out : p.out, groups = p.in / packing.group_size;
  const int per_group = packing.group_size / kColumns<kCodes>;  // vectors
  const bool has_minima = kUneven && packing.minimum != nullptr;

  // The copies are ahead of the products: their own place in the sequence of tiles and vectors.
  struct {
    int tile, vector, slot;
    const uint8_t* rows[kRows];
  } ahead{static_cast<int>(blockIdx.x), warp, 0, {}};
  auto find_rows = [&] {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      ahead.rows[row] = static_cast<const uint8_t*>(p.weight) + row_of(ahead.tile, row) * row_bytes + 16 * t;
  };
  auto group_of = [&](int vector) { return min(vector / per_group, groups - 1); };
  auto copy_vector = [&] {
    if (ahead.tile < tiles) {
      const int at = 64 * ahead.vector;
      const bool there = at + 16 * t < row_bytes;
      uint4* to = ring + ahead.slot * kRows * kThreads + threadIdx.x;
#pragma unroll
      for (int row = 0; row < kRows; ++row) start_copy(to + row * kThreads, ahead.rows[row] + (there ? at : -16 * t), there);
      if (lane < 2 * kRows) {  // four of the scales of eight rows
        const int first = (ahead.tile * kM + lane / 4) * height + lane % 2 * 4, second = lane / 2 % 2;
        const int row = first + (second ? p.gated ? p.out : 8 : 0), end = second && p.gated ? all_rows : p.out;
        start_copy(reinterpret_cast<uint4*>(scales + ahead.slot * kWarps * kRows * 8 + lane * 4),
                   packing.scale + int64_t{group_of(ahead.vector)} * all_rows + (row < end ? row : 0), row < end);
      }
      ahead.slot = ahead.slot + 1 == kDeep ? 0 : ahead.slot + 1;
      ahead.vector += kWarps;
      if (ahead.vector >= turns * kWarps) {
        ahead.vector = warp;
        ahead.tile += gridDim.x;
        find_rows();
      }
    }
    end_group();
  };
  find_rows();
  for (int i = 0; i < kDeep; ++i) copy_vector();  // weights do not depend on the kernel before

  wait_for_inputs();
  let_next_start();
  make_operands<T, kCodes, kWarps>(p, room, reinterpret_cast<uint32_t*>(shared + room.operands), factors, measured);
  __syncthreads();

  int slot = 0, turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
    float total[kRows] = {};
    for (int step = 0; step < turns; ++step) {
      const int vector = warp + step * kWarps;
      wait_for_group<kDeep - 1>();
      __syncwarp();
      const uint4* from = ring + slot * kRows * kThreads + threadIdx.x;
      uint32_t words[kRows][4];
      float scale[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const uint4 own = from[row * kThreads];
        words[row][0] = own.x, words[row][1] = own.y, words[row][2] = own.z, words[row][3] = own.w;
        scale[row] = scales[slot * kWarps * kRows * 8 + row * 8 + g];
      }
      slot = slot + 1 == kDeep ? 0 : slot + 1;
      __syncwarp();  // the scales have been read
      copy_vector();
      if (vector >= room.vectors) continue;

      uint32_t x[kHalves<kCodes>][4];
#pragma unroll
      for (int half = 0; half < kHalves<kCodes>; ++half) {
        uint4 own = make_uint4(0, 0, 0, 0);
        if (g < room.used) own = operands[((vector * kHalves<kCodes> + half) * room.used + g) * 4 + t];
        x[half][0] = own.x, x[half][1] = own.y, x[half][2] = own.z, x[half][3] = own.w;
      }
      int sum[kM][4] = {};
#pragma unroll
      for (int j = 0; j < kSteps<kCodes>; ++j)
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          uint32_t a[4];
          if constexpr (kCodes == Codes::kFour) {
            const uint32_t low = words[2 * m][j], high = words[2 * m + 1][j];
            a[0] = low & 0x0f0f0f0f, a[1] = high & 0x0f0f0f0f;
            a[2] = low >> 4 & 0x0f0f0f0f, a[3] = high >> 4 & 0x0f0f0f0f;
          } else {
            a[0] = words[2 * m][2 * j], a[1] = words[2 * m + 1][2 * j];
            a[2] = words[2 * m][2 * j + 1], a[3] = words[2 * m + 1][2 * j + 1];
          }
          multiply_codes(sum[m], a, x[j / 2][j % 2 * 2], x[j / 2][j % 2 * 2 + 1]);
        }
      const float2 factor = factors[vector * 4 + t];
      const int sum_of_x = __float_as_int(factor.y);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const int zero = kUneven ? zero_of<kCodes>(packing, row_of(tile, row), group_of(vector), groups) : kMiddle<kCodes>;
        const int all = sum[row / 2][row % 2 * 2] * 128 + sum[row / 2][row % 2 * 2 + 1] - zero * sum_of_x;
        total[row] = fmaf(static_cast<float>(all), factor.x * scale[row], total[row]);
        if constexpr (kUneven) {
          const int64_t at = static_cast<int64_t>(group_of(vector)) * all_rows + row_of(tile, row);
          const float minimum = has_minima ? __ldg(packing.minimum + at) : 0.f;
          total[row] = fmaf(static_cast<float>(sum_of_x), factor.x * minimum, total[row]);
        }
      }
    }
    auto& own = partial[turn % 2];  // of the tile before some threads may still read
#pragma unroll
    for (int row = 0; row < kRows; ++row) own[row / 2][warp][g + row % 2 * 8][t] = total[row];
    __syncthreads();
#pragma unroll 1
    for (int m = 0; m < kM; ++m)
      finish_tile<T>(p, own[m], measured, tile * kM + m, turn * kM + m, p.gated ? Tile::kGated : Tile::kWide, p.norm);
  }
}

template <typename T, Codes kCodes, int kWarps, int kM, bool kUneven>
cudaError_t run(const GemvParams& p, cudaStream_t stream) {
  const size_t shared = Room<kCodes>(p.rows, p.in, kWarps, kM).all;
  const auto kernel = integer_gemv_kernel<T, kCodes, kWarps, kM, kUneven>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kWarps * 32, shared);
  const int tiles = static_cast<int>(blocks_for(p.out, (p.gated ? 8 : 16) * kM));
  const int resident = std::max(blocks, 1) * static_cast<int>(multiprocessors());
  return launch(kernel, std::min(tiles, resident), kWarps * 32, shared, stream, p);
}

// How many warps a block has, so that there are two blocks, or one where x takes more room; 0: it takes too much.
template <Codes kCodes>
int warps_for(const GemvParams& p) {
  const int64_t most = device_property<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
  auto needs = [&](int warps, int m) {  // with what is beside: partial sums
    return Room<kCodes>(p.rows, p.in, warps, m).all + int64_t{2} * m * warps * 16 * 5 * 4 + warps * 32;
  };
  if (2 * (needs(8, 2) + 1024) <= most) return 8;
  return needs(16, 1) <= most ? 16 : 0;
}

template <typename T, Codes kCodes, bool kUneven>
cudaError_t run_warps(const GemvParams& p, cudaStream_t stream) {
  return warps_for<kCodes>(p) == 16 ? run<T, kCodes, 16, 1, kUneven>(p, stream) : run<T, kCodes, 8, 2, kUneven>(p, stream);
}

template <typename T, Codes kCodes>
cudaError_t run_codes(const GemvParams& p, cudaStream_t stream) {
  if (p.packing.zero != nullptr || p.packing.minimum != nullptr) return run_warps<T, kCodes, true>(p, stream);
  return run_warps<T, kCodes, false>(p, stream);
}

template <typename T>
cudaError_t run_type(const GemvParams& p, cudaStream_t stream) {
  return p.packing.codes == Codes::kFour ? run_codes<T, Codes::kFour>(p, stream) : run_codes<T, Codes::kEight>(p, stream);
}

}  // namespace

bool has_integer_gemv(const GemvParams& p) {
  const bool four = p.packing.codes == Codes::kFour;
  if ((!four && p.packing.codes != Codes::kEight) || p.rows > kIntegerRows || p.in % 32 != 0 || p.out % 4 != 0 ||
      reinterpret_cast<uintptr_t>(p.packing.scale) % 16 != 0)
    return false;
  // Making operands of more rows takes longer than it saves where a block has few tiles.
  if (p.rows > 2 && blocks_for(p.out, p.gated ? 16 : 32) < 4 * multiprocessors()) return false;
  if (p.packing.group_size % (four ? kColumns<Codes::kFour> : kColumns<Codes::kEight>) != 0) return false;
  return (four ? warps_for<Codes::kFour>(p) : warps_for<Codes::kEight>(p)) != 0;
}

cudaError_t integer_gemv(DType dtype, const GemvParams& p, cudaStream_t stream) {
  if (!has_integer_gemv(p)) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
