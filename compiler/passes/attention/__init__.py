"""Give attention its projections' merged output, its rotary embedding and its per-head norms.

Given:   q = GemmBiasAct(x, Wq) → Reshape → (RMSNorm) → Transpose → rotary
         k = GemmBiasAct(x, Wk) → Reshape → (RMSNorm) → Transpose → rotary
         v = GemmBiasAct(x, Wv) → Reshape → Transpose
         Sdpa(q, k, v) → Transpose → Reshape
Result:  CausalAttention(GemmBiasAct(x, [Wq; Wk; Wv]), key_cache, value_cache, cu_seqlens,
         past_lens, cos, sin, q_norm, k_norm, v_norm), and the graph takes and returns the KV cache

Given:   Sdpa of latent attention: keys from GemmBiasAct(latent, Wkv) and, for what is rotated, from
         GemmBiasAct(x, Wk) that all heads share; values from the first, of fewer elements
Result:  LatentAttention, which caches one row of latent and shared columns; see `latent`. Where
         that is no smaller, or there is more between, CausalAttention of heads that are whole, as
         one without a latent has them, so the cache keeps these; values are filled up, and what is
         filled up is left out behind it

Given:   Sdpa of keys and values that an Sdpa before it has read
Result:  CachedAttention(GemmBiasAct(x, Wq), key_cache, value_cache, …) of what that one has cached

Given:   Sdpa of an encoder, or of a decoder with keys and values made from the encoder's output
Result:  BidirectionalAttention(q, k, v, cu_seqlens); the decoder's also takes memory_starts and
         encoder_sequence_length, which say where in k and v a sequence's are

A bias of the scores must depend on the distance of key and query alone, or on the key's position:
it becomes a table.

What lies between a projection and Sdpa is run, not compared with a drawing:

    heads    which column of the projection each element of each head comes from, so that fused,
             interleaved and repeated layouts all become a choice of rows of the weight
    rotary   the rotation at every position, whatever scaling the model's rope uses
    gates    what multiplies the heads' results, brought behind where they are joined
    bias     what is added to the scores, by distance or by key
    rule     what these must be together, and the rewrite
"""

from llmc.compiler.passes.attention.rule import attention

__all__ = ["attention"]
