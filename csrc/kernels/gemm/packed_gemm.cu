// y = act(x * weight^T + bias) + residual for 9 to some hundred rows of x and quantized weights:
// between packed_gemv.cu, for which x is free, and cuBLASLt, for which the weight must be
// dequantized first.
//
// A tile is 128 weight rows for kTokens rows of x. A warp takes 32 weight rows (gated: 16 gates and
// their 16 ups) for all rows of x, or for half of them with eight warps. A stage is 64 bytes of
// each weight row and the x that belongs to them; kStages of them are in flight to shared memory.
// Codes become 16-bit values in registers, rounded as dequantize() does except that scales are
// rounded first. The assignment of columns to threads is that of packed_gemv.cu.
//
// Stream-K: a persistent grid divides all stages of all tiles evenly, so that several blocks may
// share a tile. Each writes its partial sums, and the last one to arrive adds them in the order of
// the columns, so the same x gives the same y. Reads the weight once per kTokens rows of x, and x
// once per tile, from L2.
#include <algorithm>

#include "gemv.cuh"
#include "packed_gemm.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kRowBytes = 64;  // of a weight row in a stage
constexpr int kOut = 128;      // weight rows of a tile
constexpr int kStages = 3;
constexpr int kMaxSharesPerTile = 4;  // blocks per tile, unless tiles are few

template <CodeType kCodeType>
constexpr int kColumns = kRowBytes * 8 / kBits<kCodeType>;  // of a stage

// Parameters of a row's group, in both halves of a word.
struct GroupParams {
  uint32_t scale, minimum, offset;
};

// Stream-K fixup: writes the block's partial sums of a tile. In the block that arrives last, adds
// those of all blocks of the tile in order of the columns and returns true.
template <int kTiles, int kThreads, typename Clear>
__device__ __forceinline__ bool fix_up(const StreamKSchedule& schedule, int tile_begin, int mine,
                                       int blocks, bool& is_last, const Clear& clear,
                                       float (&total)[2][kTiles][4]) {
  constexpr int kNumbers = 2 * kTiles * 4;
  auto place = [&](int slot, int i) {
    return schedule.partial + (static_cast<int64_t>(slot) * kNumbers + i) * kThreads + threadIdx.x;
  };
#pragma unroll
  for (int i = 0; i < kNumbers; ++i)
    *place(mine, i) = total[i / (kTiles * 4)][i / 4 % kTiles][i % 4];
  __threadfence();
  __syncthreads();
  // The first and the last block of the tile.
  const int from = schedule.owner(tile_begin, blocks),
            to = schedule.owner(tile_begin + schedule.stages - 1, blocks);
  if (threadIdx.x == 0) {
    is_last = atomicAdd(schedule.counters + from, 1) == to - from;
    if (is_last) schedule.counters[from] = 0;
  }
  __syncthreads();
  if (!is_last) return false;
  __threadfence();
  clear(total[0]), clear(total[1]);
  for (int other = from; other <= to; ++other) {
    const int slot = 2 * other + (other == from);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i)
      total[i / (kTiles * 4)][i / 4 % kTiles][i % 4] += __ldcg(place(slot, i));
  }
  return true;
}

// Epilogue through the stage that has been read, as many rows of x at a time as fit, so that
// outputs are contiguous: bias, activation, gate, residual. A thread first has outputs of one
// weight row, then of 16 bytes of y. `at` is the last stage of the tile.
template <typename T, int kTiles, int kSides, int kStageVectors>
__device__ __forceinline__ void store_outputs(const GemvParams& p, const StreamKSchedule& schedule,
                                              const int& warp, int side, const int& g, int t,
                                              const int& tile_out, int at, const int& out_tile,
                                              float (&total)[2][kTiles][4], int column,
                                              bool changes, float bias, float of_up, float* sums) {
  constexpr int kThreads = 128 * kSides, kTokens = kTiles * 8 * kSides;
  constexpr int kParts = kTokens * kOut / 2 > kStageVectors * 4 ? 4 : 2,
                kTilesOfPart = kTiles / kParts;
  constexpr int kPart = kTokens / kParts, kWide = 8;
  for (int part = 0; part < kParts; ++part) {
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (n / kTilesOfPart == part) {
            // gates first, then their ups
            const int row = p.gated ? m * (kOut / 2) + warp * 16 + c / 2 * 8 + g
                                    : warp * 32 + m * 16 + c / 2 * 8 + g;
            sums[((side * kTilesOfPart + n % kTilesOfPart) * 8 + 2 * t + c % 2) * kOut + row] =
                total[m][n][c];
          }
    __syncthreads();
    if (changes) {
      for (int place = threadIdx.x / tile_out; place < kPart; place += kThreads / tile_out) {
        float& value = sums[place * kOut + column];
        value = device::activate(value + bias, p.activation);
        if (p.gated) value *= sums[place * kOut + kOut / 2 + column] + of_up;
      }
      __syncthreads();
    }
    const int first_token =
        at / schedule.stages / schedule.out_tiles * kTokens + part * kTilesOfPart * 8;
    auto write = [&](auto width) {
      constexpr int kWidth = width.value;
      const int vectors = tile_out / kWidth;
#pragma unroll 2
      for (int i = threadIdx.x; i < kPart * vectors; i += kThreads) {
        const int place = i / vectors, first_output = i % vectors * kWidth;
        const int row =
            first_token + place / (kTilesOfPart * 8) * kTiles * 8 + place % (kTilesOfPart * 8);
        if (out_tile * tile_out + first_output >= p.out || row >= p.rows) continue;
        const int64_t to = static_cast<int64_t>(row) * p.out + out_tile * tile_out + first_output;
        Vec<T, kWidth> residual{};
        float result[kWidth];
        if (p.residual != nullptr)
          residual = load<T, kWidth>(static_cast<const T*>(p.residual) + to);
#pragma unroll
        for (int k = 0; k < kWidth; ++k)
          result[k] = sums[place * kOut + first_output + k] + to_float(residual.data[k]);
        OutputWriter<T>(p.y, p.y_scale_inverse).write(to, result);
      }
    };
    if (p.out % kWide == 0) write(std::integral_constant<int, kWide>());
    else write(std::integral_constant<int, 1>());
  }
}

// Producer cursor: the stage that a thread copies next.
template <typename T, int kVectorsOfWeights>
struct StageCursor {
  int at, stage, slot;
  const uint8_t* rows[kVectorsOfWeights];
  const float* scale;
  const T* x;
  int tokens;  // rows of x from this thread's first one on
};

// Producer: cp.async copies run ahead of the mma, over tiles and stages. Refers to variables of the
// kernel, like a lambda: copies of them are other machine code.
template <typename T, CodeType kCodeType, int kTiles, int kSides, typename WeightRow,
          typename GroupOf, typename Turned, typename PlaceInX>
struct Producer {
  static constexpr int kThreads = 128 * kSides, kTokens = kTiles * 8 * kSides;
  static constexpr int kStageColumns = kColumns<kCodeType>;
  static constexpr int kVectors = kStageColumns / 8;  // 16-byte vectors of x per row and stage
  static constexpr int kWeights = kOut * kRowBytes / 16,
                       kX = kTokens * kVectors;  // vectors of a stage
  static constexpr int kRowsOfX = kThreads / kVectors, kVectorsOfX = kX / kThreads,
                       kVectorsOfWeights = kWeights / kThreads;

  __device__ __forceinline__ void find_rows() const {
    const int index = ahead.at / schedule.stages, tile = index % schedule.out_tiles;
    const int token = index / schedule.out_tiles * kTokens + row_of_x;
#pragma unroll
    for (int i = 0; i < kVectorsOfWeights; ++i)
      ahead.rows[i] = static_cast<const uint8_t*>(p.weight) + 16 * part +
                      weight_row(tile, (i * kThreads + threadIdx.x) / 4) * row_bytes;
    ahead.x = static_cast<const T*>(p.x) + static_cast<int64_t>(token) * p.in + 8 * part_of_x;
    ahead.tokens = p.rows - token;
    ahead.scale = quant.scale + weight_row(tile, threadIdx.x % 16 * 8);
  }
  __device__ __forceinline__ void copy_weights(uint4* to, int stage) const {
    const bool there = stage * kRowBytes + 16 * part < row_bytes;
    const int64_t from = there ? stage * kRowBytes : -16 * part;
#pragma unroll
    for (int i = 0; i < kVectorsOfWeights; ++i) {
      const int row = (i * kThreads + threadIdx.x) / 4;
      cp_async(to + row * 4 + (part ^ turned(row)), ahead.rows[i] + from, there);
    }
    // Prefetch the scales to L2.
    if (threadIdx.x < 16)
      prefetch_l2(ahead.scale + static_cast<int64_t>(group_of(stage * kStageColumns)) * all_rows);
  }
  __device__ __forceinline__ void copy_x(uint4* to, int stage) const {
    const bool there = stage * kStageColumns + 8 * part_of_x < p.in;
    const T* from = ahead.x + stage * kStageColumns;
#pragma unroll
    for (int i = 0; i < kVectorsOfX; ++i) {
      const int row = i * kRowsOfX + row_of_x;
      const bool own = there && i * kRowsOfX < ahead.tokens;
      cp_async(to + row * kVectors + place_in_x(row, part_of_x),
               own ? from + static_cast<int64_t>(i * kRowsOfX) * p.in : static_cast<const T*>(p.x),
               own);
    }
  }
  __device__ __forceinline__ void go_on() const {
    ahead.slot = ahead.slot + 1 == kStages ? 0 : ahead.slot + 1;
    ++ahead.at;
    if (++ahead.stage < schedule.stages) return;
    ahead.stage = 0;
    find_rows();
  }
  // Weights do not depend on the previous kernel.
  __device__ __forceinline__ void start() const {
    ahead.at = first, ahead.stage = first % schedule.stages, ahead.slot = 0, find_rows();
  }

  StageCursor<T, kVectorsOfWeights>& ahead;
  const StreamKSchedule& schedule;
  const int& row_of_x;
  const GemvParams& p;
  const int& part;
  const WeightRow& weight_row;
  const int64_t& row_bytes;
  const int& part_of_x;
  const QuantParams& quant;
  const Turned& turned;
  const GroupOf& group_of;
  const int& all_rows;
  const PlaceInX& place_in_x;
  const int& first;
};

// kTiles: groups of 8 rows of x per warp; kSides: warps that share weight rows. kWhole: groups are
// whole stages; otherwise whole steps, possibly with minima.
template <typename T, CodeType kCodeType, int kTiles, int kSides, bool kWhole>
__global__ void __launch_bounds__(128 * kSides, kSides == 1 ? 3 : 1)
    packed_gemm_kernel(GemvParams p, StreamKSchedule schedule) {
  constexpr bool kMinima = !kWhole && kCodeType != CodeType::kFloat8;
  constexpr int kThreads = 128 * kSides, kTokens = kTiles * 8 * kSides, kBit = kBits<kCodeType>;
  constexpr int kStageColumns = kColumns<kCodeType>, kSteps = kStageColumns / 32;
  constexpr int kVectors = kStageColumns / 8;  // 16-byte vectors of x per row and stage
  constexpr int kWeights = kOut * kRowBytes / 16, kX = kTokens * kVectors;  // vectors of a stage
  extern __shared__ uint4 ring[];  // [kStages][kWeights + kX]
  __shared__ bool is_last;
  const int warp = threadIdx.x / 32 % 4, side = threadIdx.x / 128, g = threadIdx.x % 32 / 4,
            t = threadIdx.x % 4;
  const int tile_out = p.gated ? kOut / 2 : kOut, blocks = gridDim.x, block = blockIdx.x;
  const int64_t row_bytes = static_cast<int64_t>(p.in) * kBit / 8;
  const int first = schedule.begin(block, blocks), last = schedule.begin(block + 1, blocks);

  const QuantParams& quant = p.quant;
  const int groups = p.in / quant.group_size, all_rows = p.gated ? 2 * p.out : p.out;
  const float per_group = 1.f / quant.group_size;
  const bool has_minima = kMinima && quant.minimum != nullptr;
  auto group_of = [&](int column) {
    return min(static_cast<int>((column + 0.5f) * per_group), groups - 1);
  };

  // Weight row of row `row` of a tile. Rows beyond the last repeat it; their sums are not written.
  auto weight_row = [&](int tile, int row) {
    const int of_gated = min(tile * tile_out + row / 32 * 16 + row % 16, p.out - 1);
    return p.gated ? row / 16 % 2 * p.out + of_gated : min(tile * tile_out + row, p.out - 1);
  };
  // Swizzle: rows that are read at once share no banks.
  auto turned = [](int row) { return kWhole ? 0 : kBit == 4 ? row / 2 % 4 : row / 2 % 2 * 2; };
  auto place_in_x = [](int row, int vector) {
    return kVectors == 16 ? vector ^ vector / 8 ^ row % 2 * 2 : vector ^ row % 2;
  };

  constexpr int kVectorsOfWeights = kWeights / kThreads;
  StageCursor<T, kVectorsOfWeights> ahead{first, first % schedule.stages, 0, {}, nullptr, nullptr,
                                          0};
  const int part = threadIdx.x % 4, part_of_x = threadIdx.x % kVectors,
            row_of_x = threadIdx.x / kVectors;
  const Producer<T, kCodeType, kTiles, kSides, decltype(weight_row), decltype(group_of),
                 decltype(turned), decltype(place_in_x)>
      producer{ahead,     schedule, row_of_x, p,        part,     weight_row, row_bytes,
               part_of_x, quant,    turned,   group_of, all_rows, place_in_x, first};
  producer.start();
  for (int i = 0; i < kStages - 1 && ahead.at < last; ++i) {
    producer.copy_weights(ring + ahead.slot * (kWeights + kX), ahead.stage);
    producer.go_on();
  }
  pdl_wait();
  pdl_launch_dependents();
  producer.start();
  for (int i = 0; i < kStages - 1; ++i) {
    if (ahead.at < last)
      producer.copy_x(ring + ahead.slot * (kWeights + kX) + kWeights, ahead.stage),
          producer.go_on();
    cp_async_commit();
  }

  float total[2][kTiles][4];
  GroupParams now[2][2], next[2][2];
  int rows[2][2];
  auto begin_tile = [&](int tile) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) rows[m][h] = weight_row(tile, warp * 32 + m * 16 + h * 8 + g);
  };
  auto load_next = [&](int column) {
    const int group = group_of(column);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t at = static_cast<int64_t>(group) * all_rows + rows[m][h];
        int zero = load_zero<kCodeType>(quant, rows[m][h], group, groups);
        const float scale = __ldg(quant.scale + at);
        float minimum = has_minima ? __ldg(quant.minimum + at) : 0.f;
        if (has_minima &&
            scale !=
                0.f) {  // as a zero and a remainder, so that a rounded scale counts from about 0
          zero = static_cast<int>(fminf(fmaxf(rintf(-minimum / scale), 0.f), (1 << kBit) - 1));
          minimum = fmaf(static_cast<float>(zero), scale, minimum);
        }
        next[m][h] = {pack2<T>(scale, scale), pack2<T>(minimum, minimum),
                      dequant_offset<T, kCodeType>(zero)};
      }
  };
  auto clear = [](auto& sums) {
#pragma unroll
    for (auto& row : sums)
#pragma unroll
      for (auto& value : row) value = 0;
  };
  int begun = first;  // the first stage in `total`
  int stage = first % schedule.stages, tile = first / schedule.stages % schedule.out_tiles,
      slot = 0;
  begin_tile(tile);
  load_next(stage * kStageColumns);
  for (int at = first; at < last; ++at) {
    if (at == begun) clear(total[0]), clear(total[1]);
    auto next_group = [&](int steps) {  // loads the parameters that apply `steps` steps ahead
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) now[m][h] = next[m][h];
      const bool turns = steps == kSteps && stage + 1 == schedule.stages;
      if (turns) begin_tile((tile + 1) % schedule.out_tiles);
      load_next(turns ? 0 : stage * kStageColumns + steps * 32);
    };
    if (kWhole) next_group(kSteps);
    cp_async_wait<kStages - 2>();
    __syncthreads();
    if (ahead.at < last) {
      uint4* to = ring + ahead.slot * (kWeights + kX);
      producer.copy_weights(to, ahead.stage);
      producer.copy_x(to + kWeights, ahead.stage);
      producer.go_on();
    }
    cp_async_commit();

    uint4* here = ring + slot * (kWeights + kX);
    const uint4 *weights = here, *x = here + kWeights + (side * kTiles * 8 + g) * kVectors;
    uint4 own[2][2] = {};
    if (kWhole)
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) own[m][h] = weights[(warp * 32 + m * 16 + h * 8 + g) * 4 + t];
    slot = slot + 1 == kStages ? 0 : slot + 1;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      if (!kWhole) next_group(j + 1);
      uint32_t a[2][2][4];  // column pairs
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint4* row = weights + (warp * 32 + m * 16 + h * 8 + g) * 4;
          const uint4& bytes = own[m][h];
          uint2 words{};
          if constexpr (kBit == 4) {
            words.x = !kWhole  ? reinterpret_cast<const uint32_t*>(row + (j ^ turned(g)))[t]
                      : j == 0 ? bytes.x
                      : j == 1 ? bytes.y
                      : j == 2 ? bytes.z
                               : bytes.w;
          } else if constexpr (kWhole) {
            words = j == 0 ? make_uint2(bytes.x, bytes.y) : make_uint2(bytes.z, bytes.w);
          } else {
            words = reinterpret_cast<const uint2*>(row + ((2 * j + t / 2) ^ turned(g)))[t % 2];
          }
          dequantize_unit<T, kCodeType>(a[m][h], words, now[m][h].offset);
#pragma unroll
          for (uint32_t& pair : a[m][h])
            pair = has_minima ? hfma2<T>(pair, now[m][h].scale, now[m][h].minimum)
                              : hmul2<T>(pair, now[m][h].scale);
        }
      // Four at a time: one mma is in flight while three are issued.
#pragma unroll
      for (int first = 0; first < kTiles; first += 4) {
        uint4 own_x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          own_x[n] =
              x[(first + n) * 8 * kVectors + place_in_x(g, kWhole ? kSteps * t + j : 4 * j + t)];
#pragma unroll
        for (int k = 0; k < 4; k += 2)
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const uint32_t b0 = k == 0 ? own_x[n].x : own_x[n].z,
                           b1 = k == 0 ? own_x[n].y : own_x[n].w;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              const uint32_t of_rows[4] = {a[m][0][k], a[m][1][k], a[m][0][k + 1], a[m][1][k + 1]};
              mma_m16n8k16<T>(total[m][first + n], of_rows, b0, b1);
            }
          }
      }
    }
    const int of_tile = stage, out_tile = tile;
    if (++stage == schedule.stages) stage = 0, tile = tile + 1 == schedule.out_tiles ? 0 : tile + 1;
    if (stage != 0 && at + 1 < last) continue;

    // End of this block's share of the tile.
    const int tile_begin = at - of_tile, mine = 2 * block + (begun == tile_begin);
    const bool whole = begun == tile_begin && stage == 0;
    begun = at + 1;
    if (!whole &&
        !fix_up<kTiles, kThreads>(schedule, tile_begin, mine, blocks, is_last, clear, total))
      continue;
    const int column = threadIdx.x % tile_out, output = out_tile * tile_out + column;
    auto bias_of = [&](int of) {
      return p.bias == nullptr ? 0.f : to_float(static_cast<const T*>(p.bias)[of]);
    };
    const bool there = output < p.out,
               changes = p.gated || p.bias != nullptr || p.activation != Activation::kNone;
    const float bias = there ? bias_of(output) : 0.f,
                of_up = there && p.gated ? bias_of(p.out + output) : 0.f;
    store_outputs<T, kTiles, kSides, kWeights + kX>(p, schedule, warp, side, g, t, tile_out, at,
                                                    out_tile, total, column, changes, bias, of_up,
                                                    reinterpret_cast<float*>(here));
  }
}

// Rows of x of a tile.
int tokens_of(int rows) { return rows <= 32 ? 32 : rows <= 64 ? 64 : 128; }

template <typename T, CodeType kCodeType, int kTiles, int kSides, bool kWhole>
cudaError_t run_tiles(const GemvParams& p, void* scratch, int32_t* counters, cudaStream_t stream) {
  constexpr int kTokens = kTiles * 8 * kSides, kStageColumns = kColumns<kCodeType>;
  constexpr size_t kShared = kStages * (kOut * kRowBytes + sizeof(T) * kTokens * kStageColumns);
  if constexpr (kSides == 2)
    if (device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() < static_cast<int>(kShared))
      return run_tiles<T, kCodeType, kTiles, 1, kWhole>(p, scratch, counters, stream);
  auto kernel = packed_gemm_kernel<T, kCodeType, kTiles, kSides, kWhole>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (error != cudaSuccess) return error;
  static const int resident = resident_blocks(kernel, 128 * kSides, kShared);
  const int out_tiles = static_cast<int>(ceil_div(p.out, p.gated ? kOut / 2 : kOut));
  const int tiles = out_tiles * static_cast<int>(ceil_div(p.rows, kTokens));
  const int stages = static_cast<int>(ceil_div(p.in, kStageColumns));
  const int blocks =
      std::min({resident, tiles * std::min(stages, kMaxSharesPerTile), kPackedGemmBlocks});
  return launch(kernel, blocks, 128 * kSides, kShared, stream, p,
                StreamKSchedule{tiles, out_tiles, stages, static_cast<float*>(scratch), counters});
}

template <typename T, CodeType kCodeType, bool kWhole>
cudaError_t run_rows(const GemvParams& p, void* scratch, int32_t* counters, cudaStream_t stream) {
  switch (tokens_of(p.rows)) {
    case 32: return run_tiles<T, kCodeType, 4, 1, kWhole>(p, scratch, counters, stream);
    case 64: return run_tiles<T, kCodeType, 8, 1, kWhole>(p, scratch, counters, stream);
    default: return run_tiles<T, kCodeType, 8, 2, kWhole>(p, scratch, counters, stream);
  }
}

template <typename T>
cudaError_t run_type(const GemvParams& p, void* scratch, int32_t* counters, cudaStream_t stream) {
  return dispatch_code_type(p.quant.code_type, [&](auto codes) {
    const bool whole =
        p.quant.group_size % kColumns<codes.value> == 0 && p.quant.minimum == nullptr;
    return whole ? run_rows<T, codes.value, true>(p, scratch, counters, stream)
                 : run_rows<T, codes.value, false>(p, scratch, counters, stream);
  });
}

}  // namespace

// Room for partial sums, or for the permuted x of the Hopper kernel for many rows: whole stages of
// 16 bits.
int64_t packed_gemm_scratch(int rows, int in) {
  constexpr int kMostColumns = kColumns<CodeType::kInt4>;
  const int64_t sums =
      static_cast<int64_t>(kPackedGemmBlocks) * 2 * kOut * tokens_of(rows) * sizeof(float);
  return std::max(sums, int64_t{rows} * ceil_div(in, kMostColumns) * kMostColumns * 2);
}

bool has_packed_gemm(DType dtype, const GemvParams& p) {
  constexpr int kAnywhere = 256;
  return p.rows <= kAnywhere || (p.rows <= kPackedGemmRows && has_packed_gemm_sm90(dtype, p) &&
                                 has_large_packed_gemm_sm90(p));
}

cudaError_t packed_gemm(DType dtype, const GemvParams& p, void* scratch, int32_t* counters,
                        cudaStream_t stream) {
  const int group = p.quant.group_size;
  if (p.norm || p.rows < 1 || p.in % 32 != 0 || group < 32 || group % 32 != 0 || p.in % group != 0)
    return cudaErrorInvalidValue;
  if (has_packed_gemm_sm90(dtype, p)) return packed_gemm_sm90(dtype, p, scratch, counters, stream);
  if (dtype == DType::kFloat16) return run_type<__half>(p, scratch, counters, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, scratch, counters, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
