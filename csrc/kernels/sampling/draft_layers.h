// Kernels between the passes of a draft model with several layers, each with its caches.
//
// Row p of layer n has the token of position p + 1 + n and the hidden_out of layer n - 1 at row p.
// On the tokens of a step, layer n runs `lag` rows later: on the rows whose tokens are known then.
// Its last n rows of a sequence, whose tokens are drafts, are a separate pass, the tail. The next
// step computes them again.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "drafts.h"

namespace llmc::kernels {

// Sequences of a step, in order; see DraftLayers of engine/draft_layers.h.
struct LayerSequences {
  const int32_t* of_token;         // [num_tokens]
  const int32_t *firsts, *ends;    // [sequences], tokens of the step
  const int32_t *slots, *sampled;  // [sequences]; sampled: index in the step's sample, or -1
  const int32_t* lags;             // [sequences], rows that precede the step's: the most lag
  int count;
};

// Inputs of layer `layer` on the tokens of a step, after the layer before has run on them.
struct LagRowsParams {
  LayerSequences sequences;
  const int64_t *ids, *position_ids;       // [num_tokens], of the first layer
  const void* hidden_out;                  // T [num_tokens, width], of the layer before
  const void* carried;                     // T [slots, width], its row before the step's
  int64_t *lagged_ids, *lagged_positions;  // [rows]
  const int32_t* past_lens;                // [batch], of the step
  int32_t* lagged_past_lens;               // [batch]
  void* hidden;                            // T [rows, width]
  int num_tokens, rows, batch, layer, width;
  bool by_rows;  // each row is a sequence of the batch
};
cudaError_t lag_rows(DType dtype, const LagRowsParams& params, cudaStream_t stream);

// carried[slot]: the row of the layer before at which layer `layer` continues in the next step.
struct CarryRowsParams {
  LayerSequences sequences;
  const int32_t* counts;         // [num_sampled], sampled tokens of each; null: one each
  const int32_t* before_drafts;  // [num_sampled], the last token of the step before the drafts
  const void* hidden_out;        // T [num_tokens, width]
  void* carried;
  int layer, width;
};
cudaError_t carry_rows(DType dtype, const CarryRowsParams& params, cudaStream_t stream);

// Inputs of the tail of layer `layer`: `layer` rows of each drafting sequence.
struct TailRowsParams {
  DraftInputs next;             // of the drafting sequences
  const int64_t* drafts;        // [sequences, kMaxProposals]
  const int32_t* origins;       // [sequences], positions before which there are no rows
  const void* carried;          // of this layer
  const void* hidden_out;       // T [sequences * (layer - 1), width], of the tail before
  int64_t *ids, *position_ids;  // [rows]
  int32_t *past_lens, *block_table;
  void* hidden;  // T [rows, width]
  int sequences, rows, layer, width, padding_block;
};
cudaError_t tail_rows(DType dtype, const TailRowsParams& params, cudaStream_t stream);

}  // namespace llmc::kernels
