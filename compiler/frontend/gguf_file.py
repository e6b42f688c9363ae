"""A .gguf file: config and tokenizer through transformers, tensors dequantised as they are read."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from llmc.compiler.frontend.raw import Check, RawModel, unchecked
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError


def load_gguf(path: Path, check: Check = unchecked) -> RawModel:
    """Export the model in a GGUF file. Quantised weights become float32.

    Raises:
        LlmcError: the file is broken, or transformers does not know its architecture.
    """
    from gguf import GGUFReader
    from transformers import AutoConfig

    from llmc.compiler.frontend.export import export

    try:
        reader = GGUFReader(path)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # gguf and transformers raise many kinds for a bad file
        first = str(error).strip().splitlines()[0][:160] if str(error).strip() else repr(error)
        raise LlmcError(f"'{path}' cannot be read as GGUF ({first})") from error
    if config.is_encoder_decoder:
        raise LlmcError(f"'{path}' holds an encoder-decoder model, which llmc reads from a Hugging "
                        f"Face directory only; give that")
    plain = config.to_dict()
    if not plain.get("architectures"):
        plain["architectures"] = [type(config).__name__.replace("Config", "ForCausalLM")]
    check(plain, {}, False)
    exported = export(config, _tensors(path, reader, config), str(path))

    def save_tokenizer(target: Path) -> None:
        from transformers import AutoTokenizer
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(target)

    return RawModel(exported.graph, plain, "gguf", save_tokenizer, {}, tuple(exported.notes))


def _tensors(path: Path, reader, config) -> dict[str, Weight]:
    """Every tensor by its Hugging Face name, unread."""
    import torch
    from gguf import dequantize
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    with torch.device("meta"):
        names = get_gguf_hf_weights_map(AutoModelForCausalLM.from_config(config), processor)

    @lru_cache(maxsize=2)
    def whole(index: int) -> np.ndarray:
        tensor = reader.tensors[index]
        # Mapped for each read: what has been read of a mapped file counts as memory in use.
        data = np.memmap(path, tensor.data.dtype, "r", int(tensor.data_offset), tensor.data.shape)
        values = dequantize(data, tensor.tensor_type)
        result = processor.process(weights=values, name=tensor.name, tensor_key_mapping=names,
                                   parsed_parameters={"tensors": {}})
        return np.asarray(result.weights, dtype=np.float32)

    found: dict[str, Weight] = {}
    for index, tensor in enumerate(reader.tensors):
        if tensor.name in names:
            shape = tuple(int(dim) for dim in reversed(tensor.shape))
            found[names[tensor.name]] = Weight(
                shape, np.float32, lambda a, b, i=index: whole(i)[a:b], names[tensor.name])
    return found
