"""`schedule.json`: what the CUDA engine runs for one rank; `encoder.json`: what of an encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmc.errors import LlmcError
from llmc.runtime.manifest import DTypeName

SCHEDULE_NAME = "schedule.json"
ENCODER_SCHEDULE_NAME = "encoder.json"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ScheduledTensor(_Frozen):
    """A tensor of the schedule.

    `shape` has names for a step's sizes: `num_tokens`, `num_logits`, `batch`, `batch_plus_1`,
    and `num_memory_tokens` for the rows of a `memory`, which an encoder's tokens are scattered to
    and its decoder reads. A value lies `offset` bytes per token (`per_logit`: per wanted logit)
    into the arena.
    """

    name: str
    kind: Literal["input", "weight", "cache", "memory", "value"]
    dtype: DTypeName
    shape: tuple[int | str, ...]
    offset: int = Field(default=0, ge=0)
    per_logit: bool = False


class ScheduledNode(_Frozen):
    """An op and its fields; tensors by number, -1 for an absent input or an unused output."""

    op: str
    fields: dict[str, int | float | str]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Schedule(_Frozen):
    """Tensors, nodes in order, the arena's size per token and per logit, and the logits' tensor,
    which an encoder has not: -1.
    """

    tensors: tuple[ScheduledTensor, ...]
    nodes: tuple[ScheduledNode, ...]
    token_bytes: int = Field(ge=0)
    logit_bytes: int = Field(ge=0)
    logits: int = Field(default=-1, ge=-1)

    @model_validator(mode="after")
    def _numbers_exist(self) -> Schedule:
        for node in self.nodes:
            for number in (*node.inputs, *node.outputs):
                if not -1 <= number < len(self.tensors):
                    raise ValueError(f"{node.op} uses tensor {number} of {len(self.tensors)}")
        if self.logits >= len(self.tensors):
            raise ValueError(f"the logits are tensor {self.logits} of {len(self.tensors)}")
        return self


def read_schedule(path: Path) -> Schedule:
    """Parse and validate a schedule.

    Raises:
        LlmcError: it is missing or not a schedule.
    """
    try:
        return Schedule.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LlmcError(f"'{path}' cannot be read ({error}); compile the model again") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "top level"
        raise LlmcError(f"'{path}' is not a valid schedule: {where}: {first['msg']}; compile the "
                        f"model again") from error
