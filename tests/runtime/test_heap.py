"""Garbage collection while models run."""

import gc
import weakref

from llmc.runtime.heap import freeze_again, frozen_heap


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
