"""Where an op that keeps a state has those of a step's sequences: one for each, in their order; or
among more, where `state_slots` int32 [batch] says which.
"""

from __future__ import annotations


def state_rows(present: frozenset[str]) -> str:
    """What the first size of `state` is called."""
    return "num_states" if "state_slots" in present else "batch"


def own_states(present: frozenset[str]) -> list[str]:
    """Lines for `own_state`, the sequences' states in their order."""
    if "state_slots" not in present:
        return ["own_state = Identity(state)"]
    return ["own_state = Gather<axis=0>(state, state_slots)"]


def kept_states(present: frozenset[str]) -> list[str]:
    """Lines for `state_out` from `own_state_out`, which is of the sequences alone."""
    if "state_slots" not in present:
        return ["state_out = Identity(own_state_out)"]
    return ["state_slots_wide = Cast<to=7>(state_slots)",
            "state_slots_last = Constant<value_ints=[-1]>()",
            "state_slots_column = Unsqueeze(state_slots_wide, state_slots_last)",
            "state_out = ScatterND(state, state_slots_column, own_state_out)"]
