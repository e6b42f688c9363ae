"""Memory of target cpu: allocations of steps, retained memory, and the estimate at load."""

import subprocess
import sys

import families
import numpy as np
import pytest

import llmc
from llmc.artifacts.manifest import Chip, LayerCache, read_manifest
from llmc.errors import LlmcError
from llmc.runtime import replica
from llmc.runtime.core.step import EngineLimits, Step
from llmc.runtime.engines import cpu
from llmc.runtime.engines.row_cache import RowCache

PROMPT = [3 + 7 * index % 90 for index in range(40)]
# Loads a case directory, runs a prompt, and prints the growth of the process in megabytes.
GROWTH = """
import sys
from pathlib import Path
import llmc

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20

with llmc.LLM(sys.argv[1], kv_cache_tokens=2048, verify=False) as llm:
    before = resident()
    llm.generate([[3 + 7 * index % 90 for index in range(1500)]],
                 llmc.SamplingParams(max_tokens=1))
    print(resident() - before)
"""


@pytest.fixture(scope="module")
def wide_case(tmp_path_factory):
    """Two ranks of 8 narrow layers with wide MLPs, with 17 graphs each."""
    root = tmp_path_factory.mktemp("wide")
    model = families.tiny_model("llama", num_hidden_layers=8, intermediate_size=4096,
                                max_position_embeddings=2048)
    return families.compile_sizes(families.save(model, root / "hf"), root, [2])[2]


@pytest.fixture(scope="module")
def family_case(tmp_path_factory):
    """Factory of a family's tiny case directory, cached."""
    made = {}

    def case(family):
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            hf = families.save(families.tiny_model(family), root / "hf")
            made[family] = families.compile_sizes(hf, root, [1])[1]
        return made[family]
    return case


def chunks_of(llm, monkeypatch):
    """Return a list to which each run of the graphs appends its token count."""
    engine, chunks = families.ranks(llm)[0], []
    decode = engine._decode
    monkeypatch.setattr(engine, "_decode",
                        lambda part: chunks.append(len(part.input_ids)) or decode(part))
    return chunks


def test_all_ranks_share_one_memory_arena(wide_case):
    """With separate arenas, 34 graphs would each keep 16 MB or more."""
    done = subprocess.run([sys.executable, "-c", GROWTH, wide_case], check=True, timeout=300,
                          stdout=subprocess.PIPE, text=True)
    assert int(done.stdout) < 200


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_a_long_prompt_is_run_in_chunks_with_the_same_logits(family_case, family, monkeypatch):
    case = family_case(family)
    with llmc.LLM(case) as llm:
        whole = llm.logits(PROMPT)
        tokens, = llm.generate([PROMPT], llmc.SamplingParams(max_tokens=4, ignore_eos=True))
    monkeypatch.setattr(cpu, "MAX_CHUNK", 16)
    with llmc.LLM(case) as llm:
        chunks = chunks_of(llm, monkeypatch)
        families.assert_close(llm.logits(PROMPT), whole)
        assert chunks == [16, 16, 8]
        again, = llm.generate([[*PROMPT]], llmc.SamplingParams(max_tokens=4, ignore_eos=True,
                                                               prompt_logprobs=1))
        assert again.token_ids == tokens.token_ids
        assert max(chunks) == 16


@pytest.mark.parametrize(("family", "expected"), [
    ("llama", [16, 16, 8]), ("gemma2", [16, 10, 8, 6])])
def test_chunks_are_shorter_where_attention_holds_its_scores(family_case, family, expected,
                                                             monkeypatch):
    """Gemma 2 soft-caps scores, for which ONNX Runtime has no tiled kernel."""
    case = family_case(family)
    heads = read_manifest(case).dims.num_heads
    for name, value in ("MAX_CHUNK", 16), ("MIN_CHUNK", 5), ("SCORE_BYTES", 4 * heads * 40 * 8):
        monkeypatch.setattr(cpu, name, value)
    with llmc.LLM(case) as llm:
        chunks = chunks_of(llm, monkeypatch)
        llm.logits(PROMPT)
    assert chunks == expected


def test_bindings_are_not_cached_per_batch_size(family_case):
    with llmc.LLM(family_case("llama"), max_batch_size=8) as llm:
        prompts = [PROMPT[index:index + 5] for index in range(8)]
        llm.generate(prompts, [llmc.SamplingParams(max_tokens=count, ignore_eos=True)
                               for count in range(1, 9)])
        engine, = families.ranks(llm)
        assert len(engine._bindings) == 1


HEADS, DIM, LENGTH, SIZE, SLOTS = 2, 64, 128, 16, 4


def rows_of(blocks):
    chip = Chip.model_construct(cache=(LayerCache(num_kv_heads=HEADS, head_dim=DIM),), states=(),
                                num_heads=(HEADS,))
    limits = EngineLimits(num_blocks=blocks, block_size=SIZE, max_tokens=LENGTH, max_slots=SLOTS,
                    max_logits=1, ahead=1, max_scored=1, keeps_states=False)
    return RowCache(chip, limits, LENGTH)


def write(rows, slot, past, count, table, value):
    """Run a step of one sequence; its new positions get `value`."""
    step = Step.of([[1] * count], [past], [table], [slot])
    rows.enter(step)
    for cache in rows.caches.values():
        cache[slot, :, past:past + count] = value
    rows.leave(step)


def held(rows, slot):
    """Return the number of nonzero positions of a row; released pages are zero."""
    return int(np.count_nonzero(rows.caches["key_cache_0"][slot, 0, :, 0]))


def test_freed_rows_beyond_the_cache_size_are_released():
    """The least recently used first; its shared blocks can still be found."""
    rows = rows_of(8)  # of 16 positions
    write(rows, 0, 0, 40, [0, 1, 2], 10.0)
    write(rows, 1, 0, 64, [3, 4, 5, 6], 11.0)
    assert [held(rows, slot) for slot in range(SLOTS)] == [40, 64, 0, 0]
    write(rows, 2, 0, 16, [7], 12.0)
    assert [held(rows, slot) for slot in range(SLOTS)] == [40, 64, 16, 0]
    write(rows, 3, 0, 16, [7], 13.0)
    assert [held(rows, slot) for slot in range(SLOTS)] == [0, 64, 16, 16]
    write(rows, 3, 32, 8, [0, 1, 2], 14.0)  # shares two cached blocks of the first
    for cache in rows.caches.values():
        assert (cache[3, :, :32] == 10.0).all() and (cache[3, :, 32:40] == 14.0).all()
    write(rows, 0, 40, 1, [0, 1, 2], 15.0)  # the first continues
    for cache in rows.caches.values():
        assert (cache[0, :, :32] == 10.0).all() and (cache[0, :, 40] == 15.0).all()


def test_memory_after_a_shorter_sequence_is_released():
    rows = rows_of(8)
    write(rows, 0, 0, 120, [*range(8)], 10.0)
    assert held(rows, 0) == 120
    write(rows, 0, 0, 20, [0, 1], 11.0)
    write(rows, 1, 0, 20, [2, 3], 12.0)
    assert held(rows, 0) + held(rows, 1) <= 8 * SIZE
    write(rows, 0, 20, 1, [0, 1], 11.0)
    for cache in rows.caches.values():
        assert (cache[0, :, :21] == 11.0).all() and (cache[1, :, :20] == 12.0).all()
        assert not cache[0, :, 32:].any()


def test_step_memory_is_counted_with_the_cache(case_tp1, monkeypatch):
    manifest, room = read_manifest(case_tp1), replica.EngineConfig(16, 2048)
    taken = replica.step_bytes(manifest, room)
    each = replica.token_bytes(manifest)
    monkeypatch.setattr(replica, "memory_of_machine", lambda name: taken + 1000 * each)
    assert replica.cpu_limits(manifest, room).num_blocks * room.block_size <= 500
    with pytest.raises(LlmcError, match=r"600 tokens takes .* and a step up to .* GB"):
        replica.cpu_limits(manifest, replica.EngineConfig(16, 2048, kv_cache_tokens=600))
    assert replica.step_bytes(manifest, replica.EngineConfig(16, 64)) < taken
