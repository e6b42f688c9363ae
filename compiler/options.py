"""The options of a compilation: `CompileOptions`.

Each option is declared here once: type, default, help, range and choices. The flags of
`llmc compile`, the signature and docstring of `llmc.compile`, and the checks of types and ranges
are derived from it. `llmc --help` imports this module, so it imports nothing heavy.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from inspect import Parameter, Signature, cleandoc, signature
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, get_type_hints

from llmc.errors import shortened
from llmc.limits import MAX_CHIPS, MAX_POSITIONS, MAX_SEQUENCES
from llmc.targets import TARGETS, TargetSpec

if TYPE_CHECKING:
    from llmc.compiler.quant.scheme import Scheme

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_DTYPES = {"fp8": "float8_e4m3fn"}  # values of --quantize that differ from the dtype's name
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADS = {"int4": "int8", "uint4": "int8"}  # SmolLM2 in int4: perplexity 39.1, not 43.4

TASKS = ("generate", "embed", "classify", "token_classify")
# How errors advise to compile a model whose images are unsupported.
LANGUAGE_MODEL_ONLY = "compile the language model alone with --language_model_only"


@dataclass(frozen=True)
class Declared:
    """The annotation of an option.

    Args:
        text: help text, with other options' names in backquotes.
        choices: values for help and shell completion; a target may accept others.
        metavar: placeholder of the value in help, for options without choices.
        default: meaning of the default, where its value is not self-explanatory.
        least: minimum, inclusive.
        most: maximum, inclusive.
    """

    text: str
    choices: tuple[str, ...] = ()
    metavar: str = ""
    default: str = ""
    least: int | None = None
    most: int | None = None


@dataclass(frozen=True)
class Option:
    """An option of a compilation.

    Args:
        name: field of `CompileOptions`, and name of the flag without dashes.
        kind: type.
        default: default value.
        declared: its annotation.
    """

    name: str
    kind: Any
    default: Any
    declared: Declared

    def problem(self, value: Any) -> str | None:
        """Return why the value has the wrong type or range; None if it is valid."""
        accepts, expected = _KINDS[self.kind]
        if not accepts(value):
            return f"{self.name} is {shortened(repr(value))}, expected {expected}"
        least, most = self.declared.least, self.declared.most
        if _is_whole(value) and least is not None and value < least:
            return f"{self.name} {value} is below {least}; give {least} or more"
        if _is_whole(value) and most is not None and value > most:
            return f"{self.name} {value} is above {most}; give {most} or less"
        return None

    def help(self) -> str:
        """Return the help text and the default's meaning, with other options as flags."""
        default = f"  [default: {self.declared.default}]" if self.declared.default else ""
        return re.sub(r"`(\w+)`", r"--\1", self.declared.text + default)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_path(value: object) -> bool:
    return value is None or isinstance(value, str | Path)


# For each type of options: a predicate, and the type's name in errors.
_KINDS: dict[Any, tuple[Callable[[object], bool], str]] = {
    int: (_is_whole, "a whole number"),
    int | None: (lambda value: value is None or _is_whole(value), "a whole number or None"),
    bool: (lambda value: isinstance(value, bool), "True or False"),
    str: (lambda value: isinstance(value, str), "a text"),
    str | None: (lambda value: value is None or isinstance(value, str), "a text or None"),
    str | Path | None: (_is_path, "a path or None")}


def _of_targets(dtypes: Callable[[TargetSpec], tuple[str, ...]]) -> tuple[str, ...]:
    """Return the union of the targets' dtypes, in order."""
    return tuple(dict.fromkeys(_NAMES.get(dtype, dtype) for target in TARGETS.values()
                               for dtype in dtypes(target)))


_QUANTIZE = (*_of_targets(lambda target: target.weight_dtypes), "none")


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """The options of a compilation.

    Args:
        …
        progress: called with the name of each phase as it begins, and with remarks.
        timing_cache: file of TensorRT's timing cache; None: not stored.
    """

    tp_size: Annotated[int, Declared(
        "Tensor parallel size: chips that share the model.", least=1, most=MAX_CHIPS)] = 1
    expert_parallel: Annotated[bool, Declared(
        "Expert parallelism: each chip has whole experts of MoE layers, not slices.")] = False
    dtype: Annotated[str, Declared(
        "Dtype of weights and activations; auto: the checkpoint's, where the target has it, else "
        "the target's 16-bit dtype. half and float, and torch's dtypes, are accepted too.",
        choices=(*_of_targets(lambda target: target.dtypes), "auto"))] = "float32"
    kv_dtype: Annotated[str, Declared(
        "Dtype of the KV cache, for `target` cuda or tensorrt.",
        choices=tuple(dict.fromkeys(dtype for target in TARGETS.values()
                                    for dtype in target.kv_dtypes)), default="as `dtype`")] = ""
    quantize: Annotated[str, Declared(
        "Quantize the weights of linear layers; uint4 is int4 with zero points; none: dequantize a "
        "quantized checkpoint to `dtype`.",
        choices=_QUANTIZE, default="as in the checkpoint")] = ""
    group_size: Annotated[int, Declared(
        "Consecutive weights of a row that share a scale: on `target` cpu an even number from 16, "
        "on GPUs a multiple of 32. Layers without such a divisor of their rows are not quantized "
        "on GPUs.",
        default="the largest of 128, 64, 32 and 16 that divides the row, else the row; with fp8, "
                "or int8 and `quantize_activations`, the row")] = 0
    quantize_lm_head: Annotated[str, Declared(
        "Quantize the LM head, and the embedding where they are tied.",
        choices=_QUANTIZE, default="as `quantize`, but int8 in place of 4 bits")] = ""
    quantize_encoders: Annotated[str, Declared(
        "Quantize the linear layers of the encoders of images and audio, in groups of the default "
        "of `group_size`. Patch embeddings and convolutions are not quantized.",
        choices=_QUANTIZE, default="none")] = ""
    quantize_activations: Annotated[bool, Declared(
        "With `quantize` fp8: also quantize activations to FP8, with a scale per token. With "
        "int8, for `target` cpu: to int8, with a scale per token and per row of weights. With a "
        "block-wise FP8 checkpoint that asks for it: with a scale per group of a token.")] = False
    requantize: Annotated[bool, Declared(
        "Dequantize a quantized checkpoint, then quantize it to `quantize`.")] = False
    calibrate: Annotated[str | Path | None, Declared(
        "Text file to calibrate `quantize` on: UTF-8, at least 1024 tokens. Experts and the "
        "up-projections of latent attention are not calibrated.", metavar="TEXT")] = None
    task: Annotated[str, Declared(
        "What the model is run for: text generation; a vector for each text (embed); labels of a "
        "text or a pair of texts (classify), or of each token (token_classify).",
        choices=TASKS, default="as the checkpoint says")] = ""
    pooling: Annotated[str, Declared(
        "Pooling of a text's hidden states to a vector, with `task` embed: of its first token, the "
        "mean, or of its last.",
        choices=("cls", "mean", "last"), default="as modules.json says")] = ""
    classifier_from_token: Annotated[str, Declared(
        "With `task` classify of a causal LM: the tokens by whose logits the model answers that a "
        "document is wrong, and that it is right; the score of a pair is the sigmoid of their "
        "difference. Or the latter alone.", metavar="NO,YES",
        default="as modules.json says")] = ""
    score_template: Annotated[str | Path | None, Declared(
        "With `task` classify: Jinja template that makes one text of a pair, whose texts have the "
        "roles query and document.", metavar="FILE",
        default="with logits of tokens the chat template")] = None
    draft: Annotated[str | None, Declared(
        "Draft model for speculative decoding, for `target` cpu or cuda: mtp, the multi-token "
        "prediction layers of MODEL; model:DIR, a smaller model with the same vocabulary; or a "
        "draft model that was trained for MODEL: eagle3:DIR (EAGLE-3), dflash:DIR (DFlash) or "
        "assistant:DIR (Gemma 4's assistants).",
        metavar="KIND[:DIR]")] = None
    enable_lora: Annotated[bool, Declared(
        "Take LoRA adapters, as `llmc adapter` writes them, when the model runs, for `target` "
        "cpu or cuda.")] = False
    enable_prompt_embeds: Annotated[bool, Declared(
        "Take rows in place of embeddings of token ids (prompt_embeds of a request), for `target` "
        "cpu or cuda.")] = False
    language_model_only: Annotated[bool, Declared(
        "Compile the language model alone, without the encoders of images and audio.")] = False
    adapter: Annotated[str | Path | None, Declared(
        "Directory of a PEFT adapter to merge into the weights.", metavar="PEFT_DIR")] = None
    target: Annotated[str, Declared(
        "Engine that runs the compiled model.", choices=tuple(TARGETS))] = "cpu"
    compute_capability: Annotated[str | None, Declared(
        "Run only on GPUs of this compute capability.",
        metavar="9.0", default="any")] = None
    max_seq_len: Annotated[int | None, Declared(
        "Maximum number of positions of a sequence.",
        default="the model's; for `target` tensorrt at most 4096",
        least=2, most=MAX_POSITIONS)] = None
    mem_max_seq_len: Annotated[int | None, Declared(
        "Maximum number of input tokens of an encoder, or of rows of images that layers attend to.",
        default="the model's, at most 4096; 4 images",
        least=2, most=MAX_POSITIONS)] = None
    max_batch_size: Annotated[int, Declared(
        "Maximum number of sequences of a step, for `target` tensorrt.",
        least=1, most=MAX_SEQUENCES)] = 64
    hf_dir: Annotated[str | Path | None, Declared(
        "For an .onnx MODEL: directory with its config.json and tokenizer.")] = None
    revision: Annotated[str | None, Declared(
        "Branch, tag or commit of a hub id MODEL.", metavar="COMMIT", default="main")] = None
    trust_remote_code: Annotated[bool, Declared("Run code that comes with the model.")] = False
    allow_pickle: Annotated[bool, Declared("Read .bin weights with torch.load.")] = False
    allow_nan: Annotated[bool, Declared(
        "Accept NaN and infinities in weights that are not quantized.")] = False
    # Internal: not set by a flag.
    progress: Callable[[str], None] = lambda text: None
    timing_cache: Path | None = None

    @property
    def scheme(self) -> Scheme | None:
        """Quantization scheme of linear layers; None: as in the checkpoint."""
        return _scheme(self.quantize, self.group_size, self.quantize_activations)

    @property
    def head_scheme(self) -> Scheme | None:
        """Quantization scheme of the LM head, and of a tied embedding."""
        return _scheme(self.quantize_lm_head or _HEADS.get(self.quantize, self.quantize),
                       self.group_size)

    @property
    def encoder_scheme(self) -> Scheme | None:
        """Quantization scheme of the encoders of images and audio."""
        return _scheme(self.quantize_encoders, 0)

    @property
    def dequantize(self) -> bool:
        """Whether the quantized weights of a checkpoint are dequantized."""
        return self.quantize == "none"

    @property
    def calibrated(self) -> bool:
        """Whether quantization is calibrated, before partition."""
        return self.calibrate is not None


def _scheme(name: str, group_size: int, activations: bool = False) -> Scheme | None:
    from llmc.compiler.quant.scheme import Scheme

    if name in ("", "none"):
        return None
    dtype = _DTYPES.get(name, name)
    return Scheme(dtype, group_size, dtype if activations else "")


def _declared_options() -> Iterator[Option]:
    kinds = get_type_hints(CompileOptions)
    annotated = get_type_hints(CompileOptions, include_extras=True)
    for field in fields(CompileOptions):
        declared = next(iter(getattr(annotated[field.name], "__metadata__", ())), None)
        if declared is not None:
            yield Option(field.name, kinds[field.name], field.default, declared)


OPTIONS = tuple(_declared_options())


def _texts() -> str:
    """Format the options as the Args of a docstring."""
    def line(option: Option) -> str:
        declared = option.declared
        default = f" Default: {declared.default}." if declared.default else ""
        choices = f" One of {', '.join(declared.choices)}." if declared.choices else ""
        return textwrap.fill(f"{option.name}: {declared.text}{choices}{default}", 92,
                             initial_indent=" " * 4, subsequent_indent=" " * 8,
                             break_on_hyphens=False)
    return "\n".join(map(line, OPTIONS))


def _document(documented: Any) -> None:
    """Replace the ellipsis in a docstring by the options; Python 3.13 removes its indent."""
    if documented.__doc__ is not None:  # python -OO removes docstrings
        documented.__doc__ = cleandoc(documented.__doc__).replace("    …", _texts())


def takes_options(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Replace `**options` by the options in a function's signature and docstring."""
    _document(function)
    original = signature(function)
    kept = [parameter for parameter in original.parameters.values()
            if parameter.kind is not Parameter.VAR_KEYWORD]
    first = [parameter for parameter in kept if parameter.kind is not Parameter.KEYWORD_ONLY]
    options = [Parameter(option.name, Parameter.KEYWORD_ONLY, default=option.default,
                         annotation=option.kind) for option in OPTIONS]
    setattr(function, "__signature__",  # noqa: B010  mypy does not know the attribute
            Signature([*first, *options, *kept[len(first):]],
                      return_annotation=original.return_annotation))
    return function


_document(CompileOptions)
