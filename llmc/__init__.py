"""llmc: compile Hugging Face language models ahead of time and run the compiled models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmc.errors import CheckFailed, LlmcError

if TYPE_CHECKING:
    from llmc.compiler.adapter import compile_adapter
    from llmc.compiler.api import compile
    from llmc.runtime.core.llm import LLM, AsyncLLM
    from llmc.runtime.sampling.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "CheckFailed", "LlmcError", "SamplingParams", "compile",
           "compile_adapter"]


def __getattr__(name: str) -> Any:
    """Import the compiler and the runtime on first access."""
    if name in ("LLM", "AsyncLLM"):
        from llmc.runtime.core import llm
        return getattr(llm, name)
    if name == "SamplingParams":
        from llmc.runtime.sampling.params import SamplingParams
        return SamplingParams
    if name == "compile":
        from llmc.compiler.api import compile
        return compile
    if name == "compile_adapter":
        from llmc.compiler.adapter import compile_adapter
        return compile_adapter
    raise AttributeError(f"module 'llmc' has no attribute '{name}'")
