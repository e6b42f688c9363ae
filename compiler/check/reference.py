"""The original of a compiled model in transformers: what `diff` and `eval` hold it against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmc.compiler.frontend.huggingface import find_directory
from llmc.errors import LlmcError


def load_reference(model: str | Path) -> Any:
    """The torch module of a Hugging Face directory, hub id or .gguf file, in float32.

    Raises:
        LlmcError: there is none, or transformers cannot load it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(model)
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name} \
        if path.suffix == ".gguf" else {"pretrained_model_name_or_path": find_directory(model)}
    try:
        return AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32,
                                                    attn_implementation="eager").eval()
    except Exception as error:  # transformers raises many kinds for a bad model
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
        raise LlmcError(f"transformers cannot load '{model}' ({first})") from error
