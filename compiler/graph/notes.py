"""Notes: what a pass has to say beside the counts of its rewrites, as typed values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Context:
    """The compilation that messages speak of.

    Args:
        dtype: of weights and activations.
        target: its name.
        gpu: whether the target is a GPU.
    """

    dtype: str
    target: str
    gpu: bool


@dataclass(frozen=True)
class PassNote:
    """A fact that a pass has found, at most one of each class in a report."""


@dataclass(frozen=True)
class CountedNote(PassNote):
    """A fact about some weights or layers; notes of one class are added up.

    Args:
        count: of weights or layers.
    """

    count: int = 1
    # Among the counts in model_info.json; "": it is not there.
    key: ClassVar[str] = ""

    def text(self, context: Context) -> str:
        """The message to who compiles; "" where the fact needs none."""
        return ""


@dataclass(frozen=True)
class VocabularySize(PassNote):
    """Rows of the vocabulary before padding."""

    rows: int
