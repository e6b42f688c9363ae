"""Notes of the pass that quantizes: which weights are stored how, and what is not as asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.compiler.graph.notes import Context, CountedNote


@dataclass(frozen=True)
class ExpertsNotQuantized(CountedNote):
    """Layers whose experts `--quantize` leaves as they are."""

    key: ClassVar[str] = "experts left as they are"

    def text(self, context: Context) -> str:
        return (f"{self.count} layers' experts stay in {context.dtype}, as target "
                f"{context.target} has no kernel for them in the groups that they would have; "
                f"--quantize rounds the other linear layers")


@dataclass(frozen=True)
class LayersNotQuantized(CountedNote):
    """Linear layers that `--quantize` leaves as they are."""

    key: ClassVar[str] = "linear layers left as they are"

    def text(self, context: Context) -> str:
        return (f"{self.count} linear layers stay in {context.dtype}, as target {context.target} "
                f"has no kernel for them in the groups that they would have; --quantize rounds "
                f"the others")


@dataclass(frozen=True)
class ExpertsRoundedToNearest(CountedNote):
    """Layers whose experts a calibration does not reach."""

    key: ClassVar[str] = "experts rounded to nearest beside a calibration"

    def text(self, context: Context) -> str:
        return _nearest(f"the experts of {self.count} layers")


@dataclass(frozen=True)
class HeadsRoundedToNearest(CountedNote):
    """MLA up-projections that a calibration does not reach."""

    key: ClassVar[str] = "matrices of heads rounded to nearest beside a calibration"

    def text(self, context: Context) -> str:
        return _nearest(f"{self.count} matrices of heads, latent attention's,")


@dataclass(frozen=True)
class ExpertsAsInt8(CountedNote):
    """Layers whose experts become int8 exactly, as no kernel reads their code type."""

    key: ClassVar[str] = "MXFP4 as int8"

    def text(self, context: Context) -> str:
        return (f"numbers of MXFP4 are kept exactly as int8, twice their memory: the experts of "
                f"{self.count} layers")


@dataclass(frozen=True)
class Float8Dequantized(CountedNote):
    """Weights in FP8 whose activations are not quantized."""

    def text(self, context: Context) -> str:
        return (f"weights in FP8 are converted to {context.dtype} as they are read, on GPUs that "
                f"multiply FP8 too") if context.gpu else ""


@dataclass(frozen=True)
class ActivationsQuantized(CountedNote):
    """Weights whose activations are quantized to FP8."""

    key: ClassVar[str] = "activations rounded"


@dataclass(frozen=True)
class ActivationGroupsQuantized(CountedNote):
    """Those of them whose activations have a scale for each group of columns."""

    key: ClassVar[str] = "activations rounded in groups"


@dataclass(frozen=True)
class Float8Multiplied(CountedNote):
    """Weights in FP8 that kernels multiply by FP8."""

    key: ClassVar[str] = "codes of FP8 multiplied by such"

    def text(self, context: Context) -> str:
        return (f"{self.count} linear layers multiply FP8 by FP8 on GPUs of compute capability "
                f"9.0; on others both are converted to {context.dtype} as they are read") \
            if context.gpu else ""


@dataclass(frozen=True)
class ActivationsDequantized(CountedNote):
    """Weights whose activations are quantized to FP8, and multiplied in another dtype."""

    def text(self, context: Context) -> str:
        return (f"what {self.count} linear layers multiply is rounded to FP8, and multiplied in "
                f"{context.dtype}: their weights' scales are neither of rows nor of blocks that "
                f"the target's kernels take") if context.gpu else ""


@dataclass(frozen=True)
class ActivationGroupsNotQuantized(CountedNote):
    """Layers whose activations only `--quantize_activations` quantizes, in groups."""

    key: ClassVar[str] = "activations not rounded"

    def text(self, context: Context) -> str:
        return (f"what {self.count} layers multiply stays in {context.dtype}, though the "
                f"checkpoint rounds each group of it to FP8: --quantize_activations has it so, "
                f"and is faster on GPUs of compute capability 9.0")


@dataclass(frozen=True)
class ExpertActivationsNotQuantized(CountedNote):
    """Layers whose experts do not quantize activations as the checkpoint says."""

    key: ClassVar[str] = "activations of experts not rounded"

    def text(self, context: Context) -> str:
        return (f"what the experts of {self.count} layers multiply stays in {context.dtype}, "
                f"though it is said to be rounded to FP8")


@dataclass(frozen=True)
class HeadActivationsNotQuantized(CountedNote):
    """MLA up-projections that do not quantize activations as the checkpoint says."""

    key: ClassVar[str] = "what matrices of heads multiply not rounded"

    def text(self, context: Context) -> str:
        return (f"what {self.count} matrices of heads multiply, latent attention's, stays in "
                f"{context.dtype}, though it is said to be rounded to FP8")


@dataclass(frozen=True)
class LayerActivationsNotQuantized(CountedNote):
    """Linear layers that do not quantize activations as the checkpoint says."""

    key: ClassVar[str] = "what weights that have no form for it multiply not rounded"

    def text(self, context: Context) -> str:
        return (f"what {self.count} linear layers multiply stays in {context.dtype}, though it is "
                f"said to be rounded to FP8: their weights become {context.dtype}, or have parts "
                f"that say it differently")


@dataclass(frozen=True)
class HeadsNotQuantized(CountedNote):
    """MLA up-projections that the target reads dequantized."""

    key: ClassVar[str] = "matrices of heads read as numbers"


@dataclass(frozen=True)
class Dequantized(CountedNote):
    """Quantized weights of the checkpoint that no kernel of the target reads."""

    key: ClassVar[str] = "dequantised"

    def text(self, context: Context) -> str:
        return (f"the {context.target} target has no kernels for {self.count} of the checkpoint's "
                f"weights in fewer bits: they become {context.dtype}, with its memory and speed")


def _nearest(what: str) -> str:
    return (f"{what} are rounded to nearest: --calibrate scales and corrects other linear layers "
            f"only")
