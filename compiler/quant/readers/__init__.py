"""The registry of checkpoint formats. Each module beside this file that defines `READER` is one.

A format stores a quantized weight as several tensors. Its reader makes them one `Weight` under the
name that the model has for it, whose `stored` is read from them when it is written: codes, scales
and zero points, exactly as the checkpoint has them.
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
    """An ending of tensors' names, a regular expression, by which a format is recognized.

    Args:
        method: the format, as users know it.
        shared: another format has such tensors too, so marks that are not shared count first.
    """

    ending: str
    method: str
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A checkpoint format.

    Args:
        methods: the values of quant_method, each with what users call it.
        read: makes quantized weights of a decoder's tensors, by a quantization config; False
            where the config asks for something that is not supported.
        marks: of tensors, by which a checkpoint is refused whose config does not name the method.
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
        ValueError: two readers have one method.
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
