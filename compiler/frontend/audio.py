"""Export of a model's audio encoder: what a processor gives for one clip, to rows of the prompt.

transformers' models put the rows into the embeddings of a prompt by `masked_scatter`. The model's
own code runs up to that call, with a clip alone, and the rows are the encoder's output.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch
from accelerate import init_empty_weights
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from llmc.artifacts.manifest import MEDIA_ROWS
from llmc.compiler.frontend.image import Arrays, use_encoder_attention
from llmc.compiler.frontend.media_export import export_encoder, remove_unread
from llmc.compiler.frontend.one_clip import one_clip
from llmc.compiler.frontend.parts import AUDIO, build
from llmc.compiler.frontend.position_grid import has_positions_by_axis
from llmc.compiler.frontend.reproducible import Reproducible
from llmc.compiler.frontend.trace import root_cause
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError
from llmc.interrupts import check_interrupted

_CHECK = "torch_compilable_check"  # transformers' function for checks of values
_EAGER = "llmc_audio_eager"  # llmc's entry in transformers' mask interface
_PROMPT = 4  # tokens of rows; several, as some models read one as a clip that is not expanded


def trace_audio(config: Any, samples: Sequence[Arrays], row_token: int,
                by_axis: bool = False) -> onnx.ModelProto:
    """Export the audio encoder of a model from its config.

    Parameters are named as by `trace`. The graph's inputs are the arrays of a sample, except for
    masks that are always 1 and of no effect; its output is `rows`, float32 [num_rows, width].

    Args:
        config: a transformers config.
        samples: what the model's processor gives for a clip, for several lengths. Axes that differ
            are dynamic.
        row_token: token id of the positions of rows.
        by_axis: positions by axis of the language model's tokens are known.

    Raises:
        LlmcError: the encoder cannot be exported.
    """
    masks = [name for name in samples[0] if name.endswith("mask")]
    is_whole = bool(masks) and all(sample[name].all() for sample in samples for name in masks)
    use_encoder_attention(config, bool(masks) and not is_whole)
    try:
        with init_empty_weights(include_buffers=False), Reproducible():
            model: Any = build(config, AUDIO, False)
        if is_whole:
            _use_masks_of_eager(model)
        if has_positions_by_axis(model) and not by_axis:
            raise LlmcError(f"'{config.model_type}' has positions by axis, which llmc does not "
                            f"support with audio alone; {LANGUAGE_MODEL_ONLY}")
        encoder = _Encoder(model, [*samples[0]], row_token, is_whole)
        proto = export_encoder(model, encoder, {name: [sample[name] for sample in samples]
                                                for name in samples[0]}, [MEDIA_ROWS])
        if is_whole:
            remove_unread(proto, masks)
        return proto
    except LlmcError:
        raise
    except Exception as error:  # any error of the model's code
        check_interrupted()
        raise LlmcError(f"the audio encoder of '{config.model_type}' cannot be exported: "
                        f"{root_cause(error)}; {LANGUAGE_MODEL_ONLY}") from error


def _use_masks_of_eager(model: Any) -> None:
    """Give encoders that compute attention themselves the masks that they expect."""
    AttentionMaskInterface.register(_EAGER, _unpadded_mask)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not (
                module._supports_sdpa or module._supports_attention_backend):
            module.config._attn_implementation = _EAGER


def _unpadded_mask(*sizes: Any, **named: Any) -> torch.Tensor:
    """Mask function for transformers: 0 or the least number, of a clip without padding."""
    return ALL_MASK_ATTENTION_FUNCTIONS["eager"](
        *sizes, **{**named, "attention_mask": None, "use_vmap": False})


def rows_of_clip(model: Any, arrays: Mapping[str, torch.Tensor], row_token: int,
                 num_tokens: int) -> torch.Tensor:
    """Run a model's audio encoder on a clip; return its rows [num_rows, width].

    Args:
        arrays: inputs of the model for the clip.
        row_token: token id in place of a row.
        num_tokens: length of the prompt, which repeats this token.

    Raises:
        LlmcError: the model's code puts no rows into the prompt by `masked_scatter`.
    """
    ids = torch.full((1, num_tokens), row_token, dtype=torch.int64)
    with _rows_raised(model):
        try:  # not called as modules, whose calls the exporter follows to their ends
            model.base_model.forward(input_ids=ids, attention_mask=torch.ones_like(ids), **arrays)
        except _Rows as found:
            return found.rows.reshape(-1, found.rows.shape[-1])
    raise LlmcError("its code puts no rows into the prompt by masked_scatter")


class _Encoder(torch.nn.Module):
    """Arrays of a clip to rows."""

    def __init__(self, model: Any, names: Sequence[str], row_token: int, is_whole: bool) -> None:
        super().__init__()
        self.model, self._names, self._row_token = model, names, row_token
        self._is_whole = is_whole  # its arrays have no padding

    def forward(self, *arrays: torch.Tensor) -> torch.Tensor:
        whole = one_clip(sys.modules[type(self.model).__module__]) if self._is_whole \
            else contextlib.nullcontext()
        with whole:
            return rows_of_clip(self.model, dict(zip(self._names, arrays, strict=True)),
                                self._row_token, _PROMPT)


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
