"""Export of a model's audio encoder: what a processor gives for one clip, to rows of the prompt.

transformers' models put the rows into the embeddings of a prompt by `masked_scatter`. The model's
own code runs up to that call, with a clip alone, and the rows are the encoder's output.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import onnx
import torch
from accelerate import init_empty_weights

from llmc.artifacts.manifest import MEDIA_ROWS
from llmc.compiler.frontend.image import Arrays, use_encoder_attention
from llmc.compiler.frontend.media_export import export_encoder
from llmc.compiler.frontend.parts import AUDIO, build
from llmc.compiler.frontend.position_grid import has_positions_by_axis
from llmc.compiler.frontend.reproducible import Reproducible
from llmc.compiler.frontend.trace import root_cause
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError
from llmc.interrupts import check_interrupted

_CHECK = "torch_compilable_check"  # transformers' function for checks of values
_PROMPT = 4  # tokens of rows; several, as some models read one as a clip that is not expanded


def trace_audio(config: Any, samples: Sequence[Arrays], row_token: int) -> onnx.ModelProto:
    """Export the audio encoder of a model from its config.

    Parameters are named as by `trace`. The graph's inputs are the arrays of a sample; its output
    is `rows`, float32 [num_rows, width].

    Args:
        config: a transformers config.
        samples: what the model's processor gives for a clip, for several lengths. Axes that differ
            are dynamic.
        row_token: token id of the positions of rows.

    Raises:
        LlmcError: the encoder cannot be exported.
    """
    use_encoder_attention(config, any(name.endswith("mask") for name in samples[0]))
    try:
        with init_empty_weights(include_buffers=False), Reproducible():
            model: Any = build(config, AUDIO, False)
        if has_positions_by_axis(model):
            raise LlmcError(f"'{config.model_type}' has positions by axis, which llmc does not "
                            f"support with audio; {LANGUAGE_MODEL_ONLY}")
        encoder = _Encoder(model, [*samples[0]], row_token)
        return export_encoder(model, encoder, {name: [sample[name] for sample in samples]
                                               for name in samples[0]}, [MEDIA_ROWS])
    except LlmcError:
        raise
    except Exception as error:  # any error of the model's code
        check_interrupted()
        raise LlmcError(f"the audio encoder of '{config.model_type}' cannot be exported: "
                        f"{root_cause(error)}; {LANGUAGE_MODEL_ONLY}") from error


class _Encoder(torch.nn.Module):
    """Arrays of a clip to rows."""

    def __init__(self, model: Any, names: Sequence[str], row_token: int) -> None:
        super().__init__()
        self.model, self._names, self._row_token = model, names, row_token

    def forward(self, *arrays: torch.Tensor) -> torch.Tensor:
        ids = torch.full((1, _PROMPT), self._row_token, dtype=torch.int64)
        with _rows_raised(self.model):
            try:  # not called as modules, whose calls the exporter follows to their ends
                self.model.base_model.forward(
                    input_ids=ids, attention_mask=torch.ones_like(ids),
                    **dict(zip(self._names, arrays, strict=True)))
            except _Rows as found:
                return found.rows.reshape(-1, found.rows.shape[-1])
        raise LlmcError("its code puts no rows into the prompt by masked_scatter")


class _Rows(Exception):
    """The rows that a model's code puts into a prompt."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows


@contextlib.contextmanager
def _rows_raised(model: Any) -> Iterator[None]:
    """Make `masked_scatter` raise the rows; the export holds a lock, see `alone`.

    The model's code does not compare the number of rows with that of their tokens.
    """
    tensor: Any = torch.Tensor
    original = tensor.masked_scatter
    module: Any = sys.modules[type(model).__module__]
    check = getattr(module, _CHECK, None)

    def scatter(embeds: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        raise _Rows(rows)

    tensor.masked_scatter = scatter
    if check is not None:
        setattr(module, _CHECK, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        tensor.masked_scatter = original
        if check is not None:
            setattr(module, _CHECK, check)
