"""Sharding of heads, GEMMs and the vocabulary, and placement of collectives."""

from collections import Counter

import families
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmc
from llmc.artifacts.manifest import CollectiveStep, read_manifest
from llmc.compiler.frontend import load
from llmc.compiler.lower import fuse
from llmc.compiler.options import CompileOptions
from llmc.compiler.passes.shares import deal_columns
from llmc.compiler.passes.tensor_parallel import partition, share_heads


@given(st.integers(1, 12), st.integers(1, 8), st.data())
def test_every_query_head_is_on_one_rank_with_its_kv_head(num_kv_heads, group, data):
    num_heads = num_kv_heads * group
    tp_size = data.draw(st.integers(1, num_heads))
    shares = share_heads(num_heads, num_kv_heads, tp_size)
    assert len(shares) == tp_size
    assert [h for s in shares for h in range(s.start, s.stop)] == list(range(num_heads))
    for share in shares:
        heads = share.stop - share.start
        assert heads % len(share.kv_heads) == 0
        per_kv = heads // len(share.kv_heads)
        assert [h // group for h in range(share.start, share.stop)] == \
            list(np.repeat(share.kv_heads, per_kv))


@pytest.mark.parametrize(("width", "parts", "together", "expected"), [
    (100, 3, 1, [34, 33, 33]), (384, 2, 128, [256, 128]), (96, 2, 96, [48, 48]),
    (256, 3, 128, [96, 96, 64]), (100, 2, 16, [50, 50]), (100, 3, 16, [36, 32, 32]),
    (85, 3, 16, [29, 28, 28])])
def test_columns_are_split_in_quantization_groups(width, parts, together, expected):
    dealt = deal_columns(width, parts, together)
    assert [len(columns) for columns in dealt] == expected
    assert np.concatenate(dealt).tolist() == list(range(width))


def test_nine_heads_of_three_groups_on_two_ranks_are_two_groups_and_one():
    shares = share_heads(9, 3, 2)
    assert [(s.start, s.stop, s.kv_heads) for s in shares] == [(0, 6, (0, 1)), (6, 9, (2,))]


def test_kv_heads_are_replicated_where_ranks_exceed_them():
    shares = share_heads(9, 3, 4)
    assert [s.stop - s.start for s in shares] == [2, 1, 3, 3]
    assert [s.kv_heads for s in shares] == [(0,), (0,), (1,), (2,)]


def test_collectives_are_only_where_needed(tiny_hf):
    raw = load(tiny_hf)
    whole, = fuse(raw, CompileOptions(), vocab_multiple=192).graphs
    assert not any(node.op.startswith("All") for node in whole.nodes)
    for tp_size in (2, 3, 4):
        for graph in partition(whole, tp_size, "tiny"):
            counts = Counter(node.op for node in graph.nodes)
            assert counts["AllReduce"] == 1 + 2 * 4  # the embedding; attention and MLP of 4 layers
            assert counts["AllGather"] == 1  # the logits


def test_uneven_tp_sizes_give_the_same_tokens(tiny_hf, case_tp1, tmp_path):
    prompts = [[5, 6, 7, 8], [11, 12]]
    params = llmc.SamplingParams(max_tokens=20, ignore_eos=True)
    with llmc.LLM(case_tp1) as llm:
        expected = [c.token_ids for c in llm.generate(prompts, params)]
    for tp_size in (3, 4):
        llmc.compile(tiny_hf, tmp_path / str(tp_size), tp_size=tp_size)
        manifest = read_manifest(tmp_path / str(tp_size))
        assert sum(chip.num_heads[0] for chip in manifest.chips) == 4
        with llmc.LLM(tmp_path / str(tp_size)) as llm:
            assert [c.token_ids for c in llm.generate(prompts, params)] == expected


def test_all_reduce_runs_on_the_selected_rows_only(tmp_path):
    """GPT-NeoX adds attention and MLP to one residual, with one AllReduce for both."""
    model = families.tiny_model("gpt_neox")
    hf = families.save(model, tmp_path / "hf")
    manifest = llmc.compile(hf, tmp_path / "case", tp_size=2)
    collectives = [[step for step in chip.steps if isinstance(step, CollectiveStep)]
                   for chip in manifest.chips]
    assert collectives[0] == collectives[1]
    assert [step.kind for step in collectives[0]] == ["all_reduce"] * 4 + ["all_gather"]
    tokens = [5, 9, 17, 40, 3]
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(tokens), families.reference_logits(model, tokens))


@pytest.mark.parametrize("tp_size", [0, -1, 5])
def test_an_impossible_tp_size_is_refused_with_possible_ones(tiny_hf, tmp_path, tp_size):
    with pytest.raises(llmc.LlmcError, match="tp_size"):
        llmc.compile(tiny_hf, tmp_path / "x", tp_size=tp_size)
    assert not list(tmp_path.iterdir())
