"""The registry of checkpoint formats: modules of this package that define `READER`.

A format stores a quantized weight as several tensors. Its reader combines them into one `Weight`
under the model's name for it. `Weight.stored` reads codes, scales and zero points unchanged when
the weight is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.compiler.quant.readers.decoder import Decoder


@dataclass(frozen=True)
class Mark:
    """A suffix of tensor names (a regular expression) that identifies a format.

    Args:
        ending: the regular expression.
        method: the format's usual name.
        shared: whether other formats have such tensors too; such marks are tested last.
    """

    ending: str
    method: str
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A checkpoint format.

    Args:
        methods: values of quant_method, each with its usual name.
        read: makes quantized weights from a decoder's tensors, by a quantization config; False if
            the config is unsupported.
        marks: of tensors that are refused if the config does not name the method.
        config_file: the file beside config.json that older tools write.
        describe: the method with its variant; None: its name, bits and group size.
    """

    methods: Mapping[str, str]
    read: Callable[[Decoder, Mapping[str, Any]], bool]
    marks: tuple[Mark, ...] = ()
    config_file: str = ""
    describe: Callable[[Mapping[str, Any]], str] | None = None


@cache
def registry() -> Mapping[str, Reader]:
    """Every reader by quant_method, found by importing the modules on this package's path.

    Raises:
        ValueError: two readers have the same method.
    """
    readers: dict[str, Reader] = {}
    for path in sorted(path for root in __path__ for path in Path(root).glob("[a-z]*.py")):
        reader: Reader | None = vars(import_module(f"{__name__}.{path.stem}")).get("READER")
        if reader is None:
            continue
        for method in reader.methods:
            if method in readers:
                raise ValueError(f"quant_method {method!r} has two readers, the second in {path}")
            readers[method] = reader
    return readers
