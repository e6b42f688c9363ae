"""Notes of the quantize pass: storage of weights, and deviations from what was requested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.compiler.graph.notes import Context, CountedNote


@dataclass(frozen=True)
class ExpertsNotQuantized(CountedNote):
    """MoE layers whose experts `--quantize` does not quantize."""

    key: ClassVar[str] = "experts left as they are"

    def text(self, context: Context) -> str:
        return (f"{self.count} layers' experts stay in {context.dtype}, as target "
                f"{context.target} has no kernel for their format or for their number of columns "
                f"(`llmc inspect` prints them); --quantize quantizes the other linear layers")


@dataclass(frozen=True)
class LayersNotQuantized(CountedNote):
    """Linear layers that `--quantize` does not quantize."""

    key: ClassVar[str] = "linear layers left as they are"

    def text(self, context: Context) -> str:
        return (f"{self.count} linear layers stay in {context.dtype}, as target {context.target} "
                f"has no kernel for their number of rows or columns (`llmc inspect` prints them); "
                f"--quantize quantizes the others")


@dataclass(frozen=True)
class ExpertsRoundedToNearest(CountedNote):
    """MoE layers whose experts are not calibrated."""

    key: ClassVar[str] = "experts rounded to nearest beside a calibration"

    def text(self, context: Context) -> str:
        return _nearest(f"the experts of {self.count} layers")


@dataclass(frozen=True)
class HeadsRoundedToNearest(CountedNote):
    """MLA up-projections that are not calibrated."""

    key: ClassVar[str] = "matrices of heads rounded to nearest beside a calibration"  # words: ok

    def text(self, context: Context) -> str:
        return _nearest(f"{self.count} MLA up-projections")


@dataclass(frozen=True)
class ExpertsAsInt8(CountedNote):
    """MoE layers whose MXFP4 experts are stored as int8, without loss, for lack of a kernel."""

    key: ClassVar[str] = "MXFP4 as int8"

    def text(self, context: Context) -> str:
        return (f"MXFP4 weights are stored losslessly as int8, with twice the memory: the experts "
                f"of {self.count} layers")


@dataclass(frozen=True)
class Float8Dequantized(CountedNote):
    """Weights in FP8 whose activations are not quantized."""

    def text(self, context: Context) -> str:
        return (f"FP8 weights are converted to {context.dtype} when they are read, also on GPUs "
                f"with FP8 tensor cores") if context.gpu else ""


@dataclass(frozen=True)
class ActivationsQuantized(CountedNote):
    """Weights whose activations are quantized."""

    key: ClassVar[str] = "activations rounded"


@dataclass(frozen=True)
class ActivationGroupsQuantized(CountedNote):
    """Weights whose activations are quantized to FP8 with a scale for each group of columns."""

    key: ClassVar[str] = "activations rounded in groups"


@dataclass(frozen=True)
class Float8Multiplied(CountedNote):
    """FP8 weights that kernels multiply by FP8 activations."""

    key: ClassVar[str] = "codes of FP8 multiplied by such"

    def text(self, context: Context) -> str:
        return (f"{self.count} linear layers multiply FP8 by FP8 on GPUs of compute capability "
                f"9.0; on others both are converted to {context.dtype} as they are read") \
            if context.gpu else ""


@dataclass(frozen=True)
class ActivationsDequantized(CountedNote):
    """Weights whose activations are quantized to FP8 but multiplied in another dtype."""

    def text(self, context: Context) -> str:
        return (f"activations of {self.count} linear layers are quantized to FP8 but "
                f"multiplied in {context.dtype}: the target's kernels need weight scales per row "
                f"or per block") \
            if context.gpu else ""


@dataclass(frozen=True)
class ActivationGroupsNotQuantized(CountedNote):
    """Layers whose activations are quantized, in groups, only with `--quantize_activations`."""

    key: ClassVar[str] = "activations not rounded"

    def text(self, context: Context) -> str:
        return (f"activations of {self.count} layers stay in {context.dtype}, though the "
                f"checkpoint quantizes them to FP8 in groups; give --quantize_activations to do "
                f"so, which is faster on GPUs of compute capability 9.0")


@dataclass(frozen=True)
class ExpertActivationsNotQuantized(CountedNote):
    """MoE layers whose experts lack the activation quantization that the checkpoint declares."""

    key: ClassVar[str] = "activations of experts not rounded"

    def text(self, context: Context) -> str:
        return (f"activations of the experts of {self.count} layers stay in {context.dtype}, "
                f"though the checkpoint quantizes them to FP8: unsupported by the target's kernels")


@dataclass(frozen=True)
class HeadActivationsNotQuantized(CountedNote):
    """MLA up-projections without the activation quantization that the checkpoint declares."""

    key: ClassVar[str] = "what matrices of heads multiply not rounded"  # words: ok

    def text(self, context: Context) -> str:
        return (f"activations of {self.count} MLA up-projections stay in {context.dtype}, though "
                f"the checkpoint quantizes them to FP8: unsupported")


@dataclass(frozen=True)
class LayerActivationsNotQuantized(CountedNote):
    """Linear layers without the activation quantization that the checkpoint declares."""

    key: ClassVar[str] = "what weights that have no form for it multiply not rounded"

    def text(self, context: Context) -> str:
        return (f"activations of {self.count} linear layers stay in {context.dtype}, though the "
                f"checkpoint quantizes them to FP8: their weights are dequantized to "
                f"{context.dtype}, or merged from parts that differ in activation quantization")


@dataclass(frozen=True)
class HeadsNotQuantized(CountedNote):
    """MLA up-projections that are dequantized for the target."""

    key: ClassVar[str] = "matrices of heads read as numbers"  # words: ok


@dataclass(frozen=True)
class Dequantized(CountedNote):
    """Quantized weights of the checkpoint without a kernel on the target."""

    key: ClassVar[str] = "dequantised"  # words: ok

    def text(self, context: Context) -> str:
        return (f"the {context.target} target has no kernels for {self.count} of the checkpoint's "
                f"quantized weights: they are dequantized to {context.dtype}, with its memory and "
                f"speed")


def _nearest(what: str) -> str:
    return (f"{what} are rounded to nearest: --calibrate scales and corrects other linear layers "
            f"only")
