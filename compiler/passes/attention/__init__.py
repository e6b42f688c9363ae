"""Fuse attention with its projections, rotary embedding and per-head norms.

Given:   q = GemmBiasAct(x, Wq) → Reshape → (RMSNorm) → Transpose → rotary
         k = GemmBiasAct(x, Wk) → Reshape → (RMSNorm) → Transpose → rotary
         v = GemmBiasAct(x, Wv) → Reshape → Transpose
         Sdpa(q, k, v) → Transpose → Reshape
Result:  CausalAttention(GemmBiasAct(x, [Wq; Wk; Wv]), key_cache, value_cache, cu_seqlens,
         past_lens, cos, sin, q_norm, k_norm, v_norm); the graph takes and returns the KV cache

Given:   Sdpa of latent attention (MLA): keys from GemmBiasAct(latent, Wkv), and their rotary part
         from GemmBiasAct(x, Wk), shared by all heads; values from the first, with fewer elements
Result:  LatentAttention, which caches one row of latent and shared columns; see `latent`. If that
         is no smaller than keys and values, or other ops lie between, CausalAttention of whole
         heads; values are padded, and the padding is dropped from the output

Given:   Sdpa of the keys and values of an earlier Sdpa
Result:  CachedAttention(GemmBiasAct(x, Wq), key_cache, value_cache, …) of the earlier one's cache

Given:   Sdpa of an encoder, or of a decoder with keys and values of the encoder output
Result:  BidirectionalAttention(q, k, v, cu_seqlens); the decoder's also takes memory_starts and
         encoder_sequence_length, each sequence's range in k and v

Given:   Sdpa of a draft model with bidirectional attention
Result:  BlockAttention(GemmBiasAct(x, [Wq; Wk; Wv]), key_cache, value_cache, …)

Given:   Sdpa of a draft model with ModelCache as keys and values
Result:  CachedAttention(GemmBiasAct(x, Wq), key_cache, value_cache, …) of the model's caches, which
         become inputs of the graph

A bias of the scores must depend only on the distance of key and query, or only on the key's
position: it becomes a table.

The subgraph between a projection and Sdpa is probed, not matched as a pattern:

    heads    the projection's column of each element of each head, so that fused, interleaved and
             repeated layouts all become a selection of rows of the weight
    rotary   the rotation at every position, for any scaling of the model's RoPE
    gates    factors of the heads' results, moved after the heads are joined
    bias     the bias of the scores, by distance or by key
    rule     the conditions on all of these, and the rewrite
"""

from llmc.compiler.passes.attention.rule import attention

__all__ = ["attention"]
