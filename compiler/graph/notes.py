"""Typed notes of passes, reported beside the counts of their rewrites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Context:
    """The compilation that messages refer to.

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
    """A fact reported by a pass; a report has at most one of each class."""


@dataclass(frozen=True)
class CountedNote(PassNote):
    """A fact about several weights or layers; notes of one class are added up.

    Args:
        count: of weights or layers.
    """

    count: int = 1
    # The name of the count in model_info.json; "": not written there.
    key: ClassVar[str] = ""

    def text(self, context: Context) -> str:
        """The message to the user; "" if the fact needs none."""
        return ""


@dataclass(frozen=True)
class VocabularySize(PassNote):
    """Rows of the vocabulary before padding."""

    rows: int
