"""The step as seen by attention backends."""

import numpy as np

from llmc.runtime.core.step import Step


def test_step_fields_match_the_attention_backends():
    step = Step.of([[7], [8], [1, 2, 3], [4, 5]], [9, 4, 0, 16], [[3, 1], [2], [0], [5, 6]],
                   [2, 0, 1, 3], sample=[0, 1, 3], request_ids=(5, 6, 7, 8),
                   prompt_lens=(4, 4, 9, 18))
    assert (step.num_contexts, step.num_generations, step.num_ctx_tokens) == (2, 2, 5)
    assert step.num_tokens == 7 and step.seq_lens.tolist() == [1, 1, 3, 2]
    assert step.position_ids.tolist() == [9, 4, 0, 1, 2, 16, 17]
    assert step.logits_indices.tolist() == [0, 1, 6]
    assert step.request_ids == (5, 6, 7, 8) and step.prompt_lens == (4, 4, 9, 18)
    cache = step.kv_cache_params
    assert cache.use_cache and cache.num_cached_tokens_per_seq.tolist() == [9, 4, 0, 16]
    assert np.array_equal(cache.block_ids_per_seq, [[3, 1], [2, 0], [0, 0], [5, 6]])
