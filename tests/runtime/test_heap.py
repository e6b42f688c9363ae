"""Memory of Python objects while models run, and after."""

import gc
import threading
import weakref

import pytest

import llmc
from llmc.runtime.core.scheduler import Sequence
from llmc.runtime.heap import freeze_again, frozen_heap
from llmc.runtime.replica import CpuReplica


class Cycle:
    def __init__(self):
        self.own = self


def test_what_is_alive_is_exempt_until_the_end():
    before, cycle = gc.get_freeze_count(), Cycle()
    gone = weakref.ref(cycle)
    with frozen_heap():
        assert gc.get_freeze_count() > before
        del cycle
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None


def test_garbage_of_a_frozen_heap_is_collected_when_it_is_frozen_again():
    cycle = Cycle()
    gone = weakref.ref(cycle)
    with frozen_heap():
        del cycle
        freeze_again()
        assert gone() is None and gc.get_freeze_count()
    assert not gc.get_freeze_count()


def test_the_heap_is_frozen_while_a_model_is_loaded(case_tp1):
    with llmc.LLM(case_tp1) as llm:
        llm.generate([[5]], llmc.SamplingParams(max_tokens=1))
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()


@pytest.fixture
def created(monkeypatch):
    """Weak references to replicas and sequences; the collector is off."""
    references = []

    def note(kind):
        create = kind.__init__

        def noting(self, *args, **options):
            references.append(weakref.ref(self))
            create(self, *args, **options)

        monkeypatch.setattr(kind, "__init__", noting)

    note(CpuReplica)
    note(Sequence)
    gc.disable()
    yield references
    gc.enable()


@pytest.mark.usefixtures("created")
def test_a_model_without_references_is_closed_without_the_collector(case_tp1):
    before = threading.active_count()
    llm = llmc.LLM(case_tp1)
    llm.generate([[5]], llmc.SamplingParams(max_tokens=1))
    assert threading.active_count() > before
    del llm
    assert threading.active_count() == before


@pytest.mark.parametrize(("fields", "options"), [
    ({}, {}), (dict(temperature=1.0, n=2, logprobs=2, prompt_logprobs=1), {}),
    (dict(beam_width=2), {}), (dict(prediction=[5, 6, 7]), {}),
    (dict(bad_words=[[7]], stop_token_ids=[8]), dict(speculate="ngram"))])
def test_closing_frees_everything_without_the_collector(case_tp1, created, fields, options):
    """Memory of a device, too, which is needed to load the next model."""
    with llmc.LLM(case_tp1, **options) as llm:
        llm.generate([[5, 6, 7], [8, 9]], llmc.SamplingParams(max_tokens=6, **fields))
        stream = llm.stream([[5, 6, 7]], llmc.SamplingParams(max_tokens=50))
        next(stream)
        stream.close()  # aborts it
    assert len(created) >= 4
    assert all(reference() is None for reference in created)
