"""Recurrent states of the sequences of a step.

There is one state per sequence, in order, or more, with indices `state_slots` int32 [batch]. The
state is stored after the first `commit_lens` int32 [batch] new tokens of a sequence, or after all
of them. Tokens after these are drafts, whose outputs are computed from there on. With no tokens to
commit, the stored state is the one before them: zero where past_lens is 0.
"""

from __future__ import annotations


def state_rows(present: frozenset[str]) -> str:
    """Name of the first dimension of `state`."""
    return "num_states" if "state_slots" in present else "batch"


def own_states(present: frozenset[str]) -> list[str]:
    """Return lines for `own_state`, the sequences' states in order."""
    if "state_slots" not in present:
        return ["own_state = Identity(state)"]
    return ["own_state = Gather<axis=0>(state, state_slots)"]


def committed(present: frozenset[str]) -> list[str]:
    """Return lines for `commits` int64 [batch], from `lengths`."""
    if "commit_lens" not in present:
        return ["commits = Identity(lengths)"]
    return ["commits = Cast<to=7>(commit_lens)"]


def kept_states(present: frozenset[str]) -> list[str]:
    """Return lines for `state_out` from `own_state_out`, the new states of the sequences."""
    if "state_slots" not in present:
        return ["state_out = Identity(own_state_out)"]
    return ["state_slots_wide = Cast<to=7>(state_slots)",
            "state_slots_last = Constant<value_ints=[-1]>()",
            "state_slots_column = Unsqueeze(state_slots_wide, state_slots_last)",
            "state_out = ScatterND(state, state_slots_column, own_state_out)"]
