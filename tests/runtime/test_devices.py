"""Assignment of listed devices to replicas, ranks and cores."""

import os

import families
import pytest

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.runtime.devices import place


@pytest.fixture
def manifest(case_tp2, monkeypatch):
    monkeypatch.delenv("LLMC_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LLMC_CPU_DEVICES", raising=False)
    return read_manifest(case_tp2)


def devices(placements):
    return [[p.device for p in replica] for replica in placements]


def test_four_devices_are_two_replicas_of_a_two_chip_model(manifest):
    placements = place(manifest, [0, 1, 2, 3])
    assert devices(placements) == [[0, 1], [2, 3]]
    assert all(p.pinned and p.cores for replica in placements for p in replica)


def test_by_default_one_replica_shares_all_cores_unpinned(manifest):
    replica, = place(manifest, None)
    assert [p.device for p in replica] == [0, 1]
    assert not any(p.pinned for p in replica)
    assert {core for p in replica for core in p.cores} <= os.sched_getaffinity(0)


def test_a_rank_that_is_alone_on_its_host_has_all_cores(manifest):
    (alone,), = place(manifest, None, num_ranks=1)
    assert set(alone.cores) == os.sched_getaffinity(0)
    assert not alone.pinned


@pytest.mark.parametrize(("wish", "match"), [
    ([0, 0], r"device 0 is listed twice in \[0, 0\]; allowed groups: \[0, 1\], \[2, 3\]"),
    ([0], "1 devices cannot run a model of 2 chips"),
    ([0, 1, 2], "3 devices cannot run a model of 2 chips"),
    ([0, 9], "device 9 does not exist; there are 0 to 7"),
    ([1, 2], r"devices \[1, 2\] are not a group.*allowed groups: \[0, 1\]"),
    ([], "0 devices cannot run"),
])
def test_impossible_device_options_are_refused_with_valid_ones(manifest, wish, match):
    with pytest.raises(llmc.LlmcError, match=match):
        place(manifest, wish)


def test_visible_devices_restrict_and_renumber(manifest, monkeypatch):
    monkeypatch.setenv("LLMC_VISIBLE_DEVICES", "5,2")
    assert devices(place(manifest, [0, 1])) == [[5, 2]]
    with pytest.raises(llmc.LlmcError, match="device 2 does not exist; there are 0 to 1"):
        place(manifest, [2, 3])
    monkeypatch.setenv("LLMC_VISIBLE_DEVICES", "5")
    with pytest.raises(llmc.LlmcError, match="1 devices are visible, the model has 2 chips"):
        place(manifest, None)


@pytest.mark.parametrize("value", ["a", "0,0", "99"])
def test_invalid_visible_devices_are_refused(manifest, monkeypatch, value):
    monkeypatch.setenv("LLMC_VISIBLE_DEVICES", value)
    with pytest.raises(llmc.LlmcError, match="LLMC_VISIBLE_DEVICES is"):
        place(manifest, None)


def test_pinned_ranks_stay_on_their_cores(case_tp2):
    with llmc.LLM(case_tp2, device=[2, 3]) as model:
        ranks = families.engine_of(model)._ranks
        affinity = ranks._on_all_ranks(lambda rank: os.sched_getaffinity(0))
        wanted = place(model.manifest, [2, 3])[0]
    assert affinity == [set(p.cores) for p in wanted]


def test_ranks_sharing_cores_give_the_tokens_of_one_rank(case_tp1, case_tp2, all_cores):
    params = llmc.SamplingParams(max_tokens=8, ignore_eos=True)
    with llmc.LLM(case_tp1) as one, llmc.LLM(case_tp2) as two:
        expected, found = (model.generate([[5, 6, 7], [8]], params) for model in (one, two))
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
