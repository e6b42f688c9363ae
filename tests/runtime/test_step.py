"""Packing of sequences into a step."""

from llmc.runtime.core.step import Step


def test_a_step_packs_decoding_sequences_before_prefills():
    step = Step.of([[7], [8], [1, 2, 3], [4, 5]], [9, 4, 0, 16], [[3, 1], [2], [0], [5, 6]],
                   [2, 0, 1, 3], sample=[0, 1, 3])
    assert (step.batch_size, step.num_decode, step.num_prefill_tokens) == (4, 2, 5)
    assert step.num_tokens == 7 and step.seq_lens.tolist() == [1, 1, 3, 2]
    assert step.position_ids.tolist() == [9, 4, 0, 1, 2, 16, 17]
    assert step.logits_indices.tolist() == [0, 1, 6]
    assert step.block_tables.tolist() == [[3, 1], [2, -1], [0, -1], [5, 6]]
