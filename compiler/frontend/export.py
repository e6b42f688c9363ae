"""Export of a transformers model: trace a few layers without weights, and repeat them.

An encoder-decoder model is exported as two graphs: the encoder, and the decoder with the encoder
output as an input.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import torch
import transformers
from accelerate import init_empty_weights
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from llmc.artifacts.manifest import FeatureRows
from llmc.compiler.frontend.audio_export import clip_sizes, export_audio
from llmc.compiler.frontend.bind import (
    Checkpoint,
    as_modules_have,
    attach_weights,
    check_all_used,
    check_made,
    of_part,
    ties_hold,
)
from llmc.compiler.frontend.convolutions import feature_rows, reads_features
from llmc.compiler.frontend.deep_embeds import mark_deep_embeds
from llmc.compiler.frontend.features import check_features
from llmc.compiler.frontend.image_export import check_language_model, export_image
from llmc.compiler.frontend.image_masks import ImageMasks, image_masks
from llmc.compiler.frontend.logits_head import match_head
from llmc.compiler.frontend.mtp import export_mtp
from llmc.compiler.frontend.parts import (
    ATTENTION,
    CAUSAL_LM,
    DECODER,
    ENCODER,
    POOLED_PARTS,
    Part,
    attends_to_images,
    build,
    text_config,
    text_prefix,
)
from llmc.compiler.frontend.pooling import LogitScore, PoolingPlan, append_layers
from llmc.compiler.frontend.position_grid import position_grid
from llmc.compiler.frontend.raw import RawAudioEncoder, RawImageEncoder
from llmc.compiler.frontend.repeat import (
    CannotRepeat,
    LayerPlan,
    exported_names,
    plan_layers,
    repeat,
)
from llmc.compiler.frontend.trace import DoesNotRun, alone, remove_mark, to_graph, trace
from llmc.compiler.graph.elementary import sinusoidal_positions
from llmc.compiler.graph.rewrite import is_op
from llmc.compiler.graph.sdpa import SDPA
from llmc.compiler.graph.weights import Weight
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError
from llmc.runtime.multimodal.processor import ProcessorDescription


@dataclass
class Exported:
    """An exported model: the raw graph, notes for the user, and an encoder-decoder's encoder.

    With MTP layers as a draft model, `mtp` has their graphs; see `RawDraft`. `max_tokens` is the
    number of positions that the model's position table leaves for tokens, if it reserves some.
    `features` describes the rows that the encoder reads in place of tokens, if it does. `image` is
    the image encoder, `audio` that of audio clips.
    """

    graph: gs.Graph
    notes: list[str] = field(default_factory=list)
    encoder: gs.Graph | None = None
    mtp: tuple[gs.Graph, ...] = ()
    max_tokens: int | None = None
    features: FeatureRows | None = None
    image: RawImageEncoder | None = None
    audio: RawAudioEncoder | None = None


def export(config: Any, tensors: Mapping[str, Weight], origin: str, *,
           linear: Set[str] = frozenset(), trust_remote_code: bool = False,
           mtp: bool = False, pooling: PoolingPlan | None = None,
           takes_embeds: bool = False, media: ProcessorDescription | None = None) -> Exported:
    """Export a causal LM, an encoder-decoder model, or a model whose outputs are pooled.

    Args:
        config: a transformers config.
        tensors: the checkpoint's tensors by name.
        origin: name of the checkpoint in errors.
        linear: names of matrices that are stored as [out, in] even where the model's module is
            a Conv1D, [in, out].
        trust_remote_code: run code that comes with the model.
        mtp: whether to export the MTP layers of a causal LM, too.
        pooling: what to compile the model for; None: text generation.
        takes_embeds: keep the mark of the token embedding's output, see `TOKEN_EMBEDS`.
        media: preprocessing of images and audio, if their encoders are exported, too. The mark is
            then kept.

    Raises:
        LlmcError: the architecture is unknown, the export fails, a tensor is missing or unused,
            or its shape or dtype differs from the config's.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = ATTENTION
    config.dtype = torch.float32
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if pooling is not None:
        return _export_pooled(config, tensors, origin, linear, trust_remote_code, pooling)
    notes: list[str] = []
    names: dict[int, str] = {}  # of weights by identity, shared between the parts
    parts = (DECODER, ENCODER) if config.is_encoder_decoder else (CAUSAL_LM,)
    takes_images = media is not None and media.image is not None
    with alone():
        masks = check_language_model(config, media) if media is not None and takes_images \
            else ImageMasks()
        text = text_config(config)
        if text is not config and getattr(text, "use_bidirectional_attention", None) is True \
                and (masks.kind or image_masks(config, 0).kind):
            text.use_bidirectional_attention = False  # only the ranges of images are
        notes += _ignored_inputs(config, media)
        complete, all_tensors = copy.deepcopy(config), tensors
        model = _empty_model(config, parts[0], trust_remote_code)
        tensors = as_modules_have(model, tensors, linear)
        checkpoint = Checkpoint(model, tensors)
        if text_prefix(model) and type(text_config(config)) in MODEL_FOR_CAUSAL_LM_MAPPING:
            whole, config = model, _language_config(config, model)
            match_head(whole, config)
            model = _empty_model(config, parts[0], trust_remote_code)
            checkpoint = Checkpoint(model, of_part(checkpoint, whole, model))
        if not ties_hold(model, checkpoint):
            for each in (config, text_config(config)):
                each.tie_word_embeddings = False
            model = _empty_model(config, parts[0], trust_remote_code)
        completed = Checkpoint(model, _completed(model, tensors)) if config.is_encoder_decoder \
            else checkpoint
        for part in parts:
            check_features(model, part)
        check_made(model, completed, origin)
        to_images = media is not None and media.image is not None \
            and media.image.row_token_id is None
        if to_images and not attends_to_images(model):
            raise LlmcError(f"the processor of '{config.model_type}' gives no rows of the prompt, "
                            f"and its language model has no cross-attention to images; "
                            f"{LANGUAGE_MODEL_ONLY}")
        grid = position_grid(complete, clip_sizes(media)) \
            if media is not None and takes_images and not to_images else None
        # Before the language model: what is not supported ends the compilation early.
        image = audio = None
        if media is not None and takes_images:
            image = export_image(complete, all_tensors, origin, media, names, grid, masks)
        if media is not None and media.audio is not None:
            try:
                if masks.kind == "prompt":
                    raise LlmcError("prompts with images have bidirectional attention, which "
                                    "llmc does not support beside audio")
                audio = export_audio(complete, all_tensors, origin, media, names,
                                     grid is not None, masks.token_id)
            except LlmcError as error:
                if not takes_images:
                    raise
                notes.append(f"input of audio is not supported: {error}")
        graphs = [_export_part(copy.deepcopy(config), part, model, completed, origin,
                               trust_remote_code, names, notes, by_axis=grid is not None,
                               to_images=to_images)
                  for part in parts]
        if not takes_embeds and (media is None or to_images):
            remove_mark(graphs[0])
        if image is not None:
            _mark_bidirectional(graphs[0], masks, origin)
            mark_deep_embeds(graphs[0], model, image)

        draft = export_mtp(config, completed, origin, graphs[0], names, trust_remote_code) \
            if mtp else ()

        @cache
        def with_buffers() -> torch.nn.Module:
            with init_empty_weights(include_buffers=False):
                return build(copy.deepcopy(config), parts[0], trust_remote_code)

        check_all_used(model, checkpoint, names, origin, with_buffers)
        features = feature_rows(model) if len(graphs) > 1 and reads_features(model) else None
    return Exported(graphs[0], notes, graphs[1] if len(graphs) > 1 else None, draft,
                    features=features, image=image, audio=audio)


def _mark_bidirectional(graph: gs.Graph, masks: ImageMasks, origin: str) -> None:
    """Set `Sdpa.bidirectional` of each layer.

    Raises:
        LlmcError: a layer's attention is not an Sdpa node.
    """
    nodes = {int(node.attrs["layer"]): node for node in graph.nodes if is_op(node, SDPA)}
    for layer, kind in enumerate(masks.by_layer):
        if kind and layer not in nodes:
            raise LlmcError(f"attention within an image is bidirectional in layer {layer} of "
                            f"'{origin}', which bypasses transformers' attention interface; "
                            f"{LANGUAGE_MODEL_ONLY}")
        if kind:
            nodes[layer].attrs["bidirectional"] = kind


def _export_pooled(config: Any, tensors: Mapping[str, Weight], origin: str, linear: Set[str],
                   trust_remote_code: bool, plan: PoolingPlan) -> Exported:
    """Export a model with pooled outputs; see `export`."""
    part = POOLED_PARTS["embed" if plan.kind else plan.task]
    notes, names = list[str](), dict[int, str]()
    if config.is_encoder_decoder:
        raise LlmcError(f"'{config.model_type}' is an encoder-decoder model, which task "
                        f"{plan.task} does not support; use an encoder or a decoder")
    if text_config(config).pad_token_id is None:
        text_config(config).pad_token_id = 0  # classifiers need one to take the last token
    with alone():
        model: Any = _empty_model(config, part, trust_remote_code)
        tensors = as_modules_have(model, tensors, linear)
        checkpoint = Checkpoint(model, tensors)
        check_features(model, part)
        check_made(model, checkpoint, origin)
        graph = _export_part(copy.deepcopy(config), part, model, checkpoint, origin,
                             trust_remote_code, names, notes)
        plan = replace(plan, layers=tuple(
            layer.dense(_head(model, checkpoint)) if isinstance(layer, LogitScore) else layer
            for layer in plan.layers))
        checkpoint = Checkpoint(model, _without_heads(config, model, checkpoint)) \
            if plan.kind else checkpoint

        @cache
        def with_buffers() -> torch.nn.Module:
            with init_empty_weights(include_buffers=False):
                return build(copy.deepcopy(config), part, trust_remote_code)

        check_all_used(model, checkpoint, names, origin, with_buffers)
    if plan.kind:
        append_layers(graph, plan, int(graph.outputs[0].shape[-1]))
    return Exported(graph, notes, max_tokens=_max_tokens(model))


def _head(model: Any, checkpoint: Checkpoint) -> Weight:
    """The LM head of a base model's checkpoint; the token embedding if they are tied."""
    head = checkpoint.tensors.get("lm_head.weight")
    table = model.get_input_embeddings().weight
    names = [name for name, parameter in model.named_parameters() if parameter is table]
    head = head if head is not None else checkpoint.get(names[0])
    assert head is not None, names
    return head


def _without_heads(config: Any, model: Any, checkpoint: Checkpoint) -> dict[str, Weight]:
    """Remove the tensors of the heads that a base model's checkpoint has for its pretraining."""
    known = {spelling for name in model.state_dict() for spelling in checkpoint.spellings(name)}
    heads: set[str] = set()
    for name in config.architectures or ():
        architecture: Any = getattr(transformers, name, None)
        if architecture is not None and hasattr(architecture, "_from_config"):
            with torch.device("meta"):
                heads |= architecture._from_config(copy.deepcopy(config)).state_dict().keys()
    model_names = {name: known_as for known_as, name in checkpoint.names.items()}
    return {name: tensor for name, tensor in checkpoint.tensors.items()
            if model_names.get(name, name) in known
            or not {name, model_names.get(name, name)} & heads}


def _max_tokens(model: Any) -> int | None:
    """Positions for tokens, if the model's table of positions has a row for padding.

    Positions of tokens begin after that row.
    """
    most = getattr(model.config, "max_position_embeddings", None)
    tables = [module for name, module in model.named_modules()
              if isinstance(module, torch.nn.Embedding) and "position" in name
              and module.num_embeddings == most and module.padding_idx is not None]
    return most - tables[0].padding_idx - 1 if tables and most else None


def _ignored_inputs(config: Any, media: ProcessorDescription | None) -> list[str]:
    """Return a note if the model has encoders that are not compiled."""
    known = (("vision_config", "images", media and media.image),
             ("audio_config", "audio", media and media.audio))
    ignored = [kind for key, kind, compiled in known
               if getattr(config, key, None) is not None and not compiled]
    if not ignored:
        return []
    parts = ["the language model", *(f"the encoder of {kind}" for _, kind, compiled in known
                                     if compiled)]
    return [f"input of {' and '.join(ignored)} is not supported: only {' and '.join(parts)} of "
            f"'{config.model_type}' {'is' if len(parts) == 1 else 'are'} compiled"]


def _language_config(config: Any, whole: Any) -> Any:
    """Return the config of the language model of the multimodal model `whole`."""
    text = copy.deepcopy(text_config(config))
    text._attn_implementation, text.dtype = config._attn_implementation, config.dtype
    text.tie_word_embeddings = bool(whole.all_tied_weights_keys)
    return text


def _empty_model(config: Any, part: Part, trust_remote_code: bool) -> torch.nn.Module:
    with torch.device("meta"):
        return build(config, part, trust_remote_code)


def _export_part(config: Any, part: Part, model: torch.nn.Module, checkpoint: Checkpoint,
                 origin: str, trust_remote_code: bool, names: dict[int, str],
                 notes: list[str], by_axis: bool = False,
                 to_images: bool = False) -> gs.Graph:
    """Export a part as a graph. Adds to `names`, see `attach_weights`, and to `notes`."""
    bound = checkpoint.spelled & model.state_dict().keys()
    try:
        plan = plan_layers(config, part, model, trust_remote_code)
        traced = _trace_some(plan, part, trust_remote_code, by_axis, to_images)
        graph = repeat(to_graph(traced, exported_names(bound, plan)), plan)
    except CannotRepeat as reason:
        notes.append(f"all layers were exported: {reason}")
        graph = to_graph(trace(config, part, None, trust_remote_code, (), by_axis, to_images),
                         bound)
    attach_weights(graph, model, checkpoint, origin, names)
    return graph


def _trace_some(plan: LayerPlan, part: Part, trust_remote_code: bool,
                by_axis: bool, to_images: bool) -> onnx.ModelProto:
    """Export the layers that a plan picks.

    Raises:
        CannotRepeat: the model does not run without its other layers.
        LlmcError: the layers cannot be exported.
    """
    try:
        return trace(plan.config, part, plan.layers_name, trust_remote_code,
                     plan.picked if plan.cut else (), by_axis, to_images)
    except DoesNotRun as error:
        raise CannotRepeat(f"the model does not run with a few of them ({error})") from error


def _completed(model: Any, tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """Add tensors that the model computes and checkpoints omit, such as sinusoidal positions."""
    completed = dict(tensors)
    for name in sorted(model._keys_to_ignore_on_save or ()):
        owner, _, leaf = name.rpartition(".")
        if name in tensors or getattr(model.get_submodule(owner), leaf, None) is None:
            continue
        module = model.get_submodule(owner).to_empty(device="cpu", recurse=False)
        model._init_weights(module)
        table = getattr(module, leaf).detach().float().numpy()
        completed[name] = Weight.of(_reproducible(table), name)
    return completed


def _reproducible(table: np.ndarray) -> np.ndarray:
    """Recompute a table of sinusoidal positions so that it is the same on every processor."""
    if table.ndim != 2:
        return table
    sines = sinusoidal_positions(*table.shape).astype(np.float32)
    return sines if np.allclose(table, sines, rtol=0, atol=1e-6) else table
