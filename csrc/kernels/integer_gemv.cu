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
//
// kParted: the blocks of a cluster have a part of the columns each, so they make operands of that part alone, and there are
// more blocks than tiles. Their sums go to one of them, to another for each tile, which adds them up in their order while
// all take the next tile.
#include "gemv.cuh"
#include "packed.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

__host__ __device__ constexpr int stages(int m) { return m == 2 ? 4 : 6; }  // vectors under way, of each warp
constexpr float kLargest = 127 * 128;
constexpr int kMostParts = 4;  // of the columns

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

// Shared memory of a block, in bytes: the ring; the operands of x; of each vector and row of x its scale and sum; of two
// tiles what each warp of the cluster summed up, [2][sums][16 m][pitch].
template <Codes kCodes>
struct Room {
  int vectors, used;  // those of the block; columns of an operand that are not zero
  int sums, pitch;
  int64_t operands, factors, partial, all;

  __host__ __device__ Room(int rows, int in, int warps, int m, int parts) {
    const int in_all = (in + kColumns<kCodes> - 1) / kColumns<kCodes>;
    vectors = (in_all + parts - 1) / parts;
    used = 2 * rows;
    sums = parts * warps;
    pitch = rows <= 2 ? 3 : 5;
    operands = int64_t{stages(m)} * warps * m * (2 * 32 * 16 + 64);
    factors = operands + int64_t{vectors} * kHalves<kCodes> * used * 64;
    partial = factors + int64_t{vectors} * 4 * 8;
    all = partial + int64_t{2} * sums * 16 * m * pitch * 4;
  }
};

// Of columns first, ... , end - 1 of x, by all warps: operands, factors and, for a norm, the sums of each warp's numbers
// and of their squares. Waits for x.
template <typename T, Codes kCodes, int kWarps, int kMeasured>
__device__ __forceinline__ void make_operands(const GemvParams& p, const Room<kCodes>& room, int first, int end,
                                              uint32_t* operands, float2* factors, float (*measured)[kMeasured][2]) {
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
  auto column_of = [&](int turn) { return first + (turn * kWarps + warp) * kAtOnce * kColumns<kCodes> + lane * 4; };
  Vec<float, 4> weights[kBatch];  // the norm's
  auto load_weights = [&](int turn) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int column = column_of(turn);
#pragma unroll
      for (int k = 0; k < 4; ++k) weights[i].data[k] = 1;
      if (p.norm_weight != nullptr && column < end) weights[i] = load<float, 4>(p.norm_weight + column);
      if (++turn == each) turn = 0;
    }
  };
  load_weights(0);
  wait_for_inputs();
  let_next_start();

  float of_row[2] = {};
  for (int begin = 0; begin < pairs; begin += kBatch) {
    if (begin > 0) load_weights(ahead.turn);
    Vec<T, 4> fours[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int column = column_of(ahead.turn);
#pragma unroll
      for (int k = 0; k < 4; ++k) fours[i].data[k] = from_float<T>(0.f);
      if (ahead.row < p.rows && column < end)
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
        of_row[0] += x[k], of_row[1] = fmaf(x[k], x[k], of_row[1]);
        x[k] *= weights[i].data[k];
        most = max(most, __float_as_uint(fabsf(x[k])));
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
template <typename T, Codes kCodes, int kWarps, int kM, bool kUneven, bool kParted>
__global__ void __launch_bounds__(kWarps * 32, (kM == 1 ? 24 : 16) / kWarps) integer_gemv_kernel(GemvParams p) {
  constexpr int kThreads = kWarps * 32, kRows = 2 * kM, kDeep = stages(kM);
  extern __shared__ uint4 ring[];  // [kDeep][kRows][kThreads], then scales [kDeep][kWarps][kRows][8]; see Room
  __shared__ float measured[kParted ? kMostParts * kWarps : kWarps][4][2];  // of the cluster's warps
  const int parts = kParted ? cluster_size() : 1, part = kParted ? cluster_rank() : 0;
  const int begin = blockIdx.x / parts, stride = gridDim.x / parts;  // of tiles
  const Room<kCodes> room(p.rows, p.in, kWarps, kM, parts);
  auto* const shared = reinterpret_cast<unsigned char*>(ring);
  const auto* operands = reinterpret_cast<const uint4*>(shared + room.operands);
  auto* factors = reinterpret_cast<float2*>(shared + room.factors);
  auto* const partial = reinterpret_cast<float*>(shared + room.partial);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto* const scales = reinterpret_cast<float*>(ring + kDeep * kRows * kThreads) + warp * kRows * 8;
  const int height = p.gated ? 8 : 16, outputs = height * kM, tiles = (p.out + outputs - 1) / outputs;
  const int first_vector = part * room.vectors, first_column = first_vector * kColumns<kCodes>;
  const int end_column = min(p.in, first_column + room.vectors * kColumns<kCodes>);
  const int turns = (room.vectors + kWarps - 1) / kWarps;
  const int64_t row_bytes = static_cast<int64_t>(p.in) * kBits<kCodes> / 8;
  const int64_t end_byte = static_cast<int64_t>(end_column) * kBits<kCodes> / 8;
  if (kParted) arrive_at_cluster();  // others may write here from now on
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
  } ahead{begin, warp, 0, {}};
  auto find_rows = [&] {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      ahead.rows[row] = static_cast<const uint8_t*>(p.weight) + row_of(ahead.tile, row) * row_bytes + 16 * t;
  };
  auto group_of = [&](int vector) { return min(vector / per_group, groups - 1); };
  auto copy_vector = [&] {
    if (ahead.tile < tiles) {
      const int at = 64 * (first_vector + ahead.vector);
      const bool there = at + 16 * t < end_byte;
      uint4* to = ring + ahead.slot * kRows * kThreads + threadIdx.x;
#pragma unroll
      for (int row = 0; row < kRows; ++row) start_copy(to + row * kThreads, ahead.rows[row] + (there ? at : -16 * t), there);
      if (lane < 2 * kRows) {  // four of the scales of eight rows
        const int first = (ahead.tile * kM + lane / 4) * height + lane % 2 * 4, second = lane / 2 % 2;
        const int row = first + (second ? p.gated ? p.out : 8 : 0), end = second && p.gated ? all_rows : p.out;
        start_copy(reinterpret_cast<uint4*>(scales + ahead.slot * kWarps * kRows * 8 + lane * 4),
                   packing.scale + int64_t{group_of(first_vector + ahead.vector)} * all_rows + (row < end ? row : 0), row < end);
      }
      ahead.slot = ahead.slot + 1 == kDeep ? 0 : ahead.slot + 1;
      ahead.vector += kWarps;
      if (ahead.vector >= turns * kWarps) {
        ahead.vector = warp;
        ahead.tile += stride;
        find_rows();
      }
    }
    end_group();
  };
  find_rows();
  for (int i = 0; i < kDeep; ++i) copy_vector();  // weights do not depend on the kernel before

  make_operands<T, kCodes, kWarps>(p, room, first_column, end_column,
                                   reinterpret_cast<uint32_t*>(shared + room.operands), factors,
                                   measured + part * kWarps);
  __syncthreads();

  // Of the sums of two tiles, in turn: some threads may still read those of the tile before.
  auto sums_of = [&](int turn, int sum) { return partial + (turn % 2 * room.sums + sum) * 16 * kM * room.pitch; };
  auto finish = [&](int tile, int turn) {
    if (kParted && turn % parts != part) return;
    // Each tile's outputs are the work of other warps first.
    for (int i = (threadIdx.x + turn * 64) % kThreads; i < outputs * p.rows; i += kThreads) {
      const int column = i % outputs, row = i / outputs, output = tile * outputs + column;
      if (output >= p.out) continue;
      const int64_t place = static_cast<int64_t>(row) * p.out + output;
      const float added = p.residual != nullptr ? to_float(static_cast<const T*>(p.residual)[place]) : 0.f;
      const float* from = sums_of(turn, 0) + (column / height * 16 + column % height) * room.pitch + row;
      float value = 0, up = 0, total = 0, squares = 0;
      for (int sum = 0; sum < room.sums; sum += kWarps) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w, from += 16 * kM * room.pitch) {
          value += from[0];
          if (p.gated) up += from[8 * room.pitch];
          if (p.norm) total += measured[sum + w][row][0], squares += measured[sum + w][row][1];
        }
      }
      value = output_of<T>(p, value, up, total, squares, row, output, p.gated, p.norm);
      static_cast<T*>(p.y)[place] = from_float<T>(value + added);
    }
  };

  int slot = 0, turn = 0, tile = begin;
  for (; tile < tiles; tile += stride, ++turn) {
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
        const int group = group_of(first_vector + vector);
        const int zero = kUneven ? zero_of<kCodes>(packing, row_of(tile, row), group, groups) : kMiddle<kCodes>;
        const int all = sum[row / 2][row % 2 * 2] * 128 + sum[row / 2][row % 2 * 2 + 1] - zero * sum_of_x;
        total[row] = fmaf(static_cast<float>(all), factor.x * scale[row], total[row]);
        if constexpr (kUneven) {
          const int64_t at = static_cast<int64_t>(group) * all_rows + row_of(tile, row);
          const float minimum = has_minima ? __ldg(packing.minimum + at) : 0.f;
          total[row] = fmaf(static_cast<float>(sum_of_x), factor.x * minimum, total[row]);
        }
      }
    }
    if (kParted) {
      wait_for_cluster();
      if (turn > 0) finish(tile - stride, turn - 1);
      if (p.norm && turn == 0 && lane < p.rows * 2)
        for (int rank = 0; rank < parts; ++rank) {
          float* const own = &measured[part * kWarps + warp][lane / 2][lane % 2];
          if (rank != part) store_to_rank(own, rank, *own);
        }
    }
    if (t < p.rows)
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        float* const own = sums_of(turn, part * kWarps + warp) + (row * 8 + g) * room.pitch + t;
        if constexpr (kParted) store_to_rank(own, turn % parts, total[row]);
        else *own = total[row];
      }
    if (kParted) {
      arrive_at_cluster();
    } else {
      __syncthreads();
      finish(tile, turn);
    }
  }
  if (kParted) {
    wait_for_cluster();
    if (turn > 0) finish(tile - stride, turn - 1);
  }
}

// What a launch is made of: warps of a block, tiles of 16 rows at once, blocks that divide the columns, and how many blocks a
// multiprocessor has at most.
struct Form {
  int warps, m, parts, blocks;
};

template <typename T, Codes kCodes, int kWarps, int kM, bool kUneven, bool kParted>
cudaError_t run(const GemvParams& p, const Form& form, cudaStream_t stream) {
  const size_t shared = Room<kCodes>(p.rows, p.in, kWarps, kM, form.parts).all;
  const auto kernel = integer_gemv_kernel<T, kCodes, kWarps, kM, kUneven, kParted>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  const int tiles = static_cast<int>(blocks_for(p.out, (p.gated ? 8 : 16) * kM));
  int clusters = 0;
  if constexpr (kParted) {
    const Launch all(form.parts, kWarps * 32, shared, stream, form.parts);
    cudaOccupancyMaxActiveClusters(&clusters, kernel, all.config());
  } else {
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters, kernel, kWarps * 32, shared);
    clusters *= static_cast<int>(multiprocessors());
  }
  const int most = form.blocks * static_cast<int>(multiprocessors()) / form.parts;
  const int grid = std::max(std::min({tiles, clusters, most}), 1) * form.parts;
  return cudaLaunchKernelEx(Launch(grid, kWarps * 32, shared, stream, form.parts).config(), kernel, p);
}

// So that there are two blocks, or one where x takes more room; no warps: it takes too much.
template <Codes kCodes>
Form form_of(const GemvParams& p) {
  const int64_t most = device_property<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
  auto needs = [&](int warps, int m, int parts) {  // with what is beside: what is measured
    return Room<kCodes>(p.rows, p.in, warps, m, parts).all + parts * warps * 32;
  };
  // Where each block would have a tile at most, and much of x to make operands of.
  const int64_t columns = int64_t{p.rows} * p.in;
  if (device_property<cudaDevAttrComputeCapabilityMajor>() >= 9 && blocks_for(p.out, p.gated ? 16 : 32) <= multiprocessors() &&
      columns > 9000) {
    const int parts = columns < 28000 ? 2 : kMostParts;
    if (2 * (needs(8, 2, parts) + 1024) <= most) return {8, 2, parts, 2};
  }
  if (2 * (needs(8, 2, 1) + 1024) <= most) return {8, 2, 1, 2};
  if (needs(16, 1, 1) <= most) return {16, 1, 1, 1};
  return {};
}

template <typename T, Codes kCodes, bool kUneven>
cudaError_t run_form(const GemvParams& p, const Form& form, cudaStream_t stream) {
  if (form.parts > 1) return run<T, kCodes, 8, 2, kUneven, true>(p, form, stream);
  return form.warps == 16 ? run<T, kCodes, 16, 1, kUneven, false>(p, form, stream)
                          : run<T, kCodes, 8, 2, kUneven, false>(p, form, stream);
}

template <typename T, Codes kCodes>
cudaError_t run_codes(const GemvParams& p, cudaStream_t stream) {
  const Form form = form_of<kCodes>(p);
  if (p.packing.zero != nullptr || p.packing.minimum != nullptr) return run_form<T, kCodes, true>(p, form, stream);
  return run_form<T, kCodes, false>(p, form, stream);
}

template <typename T>
cudaError_t run_type(const GemvParams& p, cudaStream_t stream) {
  return p.packing.codes == Codes::kFour ? run_codes<T, Codes::kFour>(p, stream) : run_codes<T, Codes::kEight>(p, stream);
}

}  // namespace

bool has_integer_gemv(const GemvParams& p) {
  const bool four = p.packing.codes == Codes::kFour;
  if ((!four && p.packing.codes != Codes::kEight) || p.rows > kIntegerRows || p.in % 32 != 0 || p.out % 4 != 0 ||
      reinterpret_cast<uintptr_t>(p.packing.scale) % 16 != 0 || reinterpret_cast<uintptr_t>(p.norm_weight) % 16 != 0)
    return false;
  // Making operands of more rows takes longer than it saves where a block has few tiles.
  if (p.rows > 2 && blocks_for(p.out, p.gated ? 16 : 32) < 4 * multiprocessors()) return false;
  if (p.packing.group_size % (four ? kColumns<Codes::kFour> : kColumns<Codes::kEight>) != 0) return false;
  return (four ? form_of<Codes::kFour>(p) : form_of<Codes::kEight>(p)).warps != 0;
}

cudaError_t integer_gemv(DType dtype, const GemvParams& p, cudaStream_t stream) {
  if (!has_integer_gemv(p)) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
