"""One peer of bench/embeddings.py: embeds lists of texts that it reads as JSON lines.

    python bench/embedding_peer.py SIDE MODEL_DIR WORK_DIR

It runs in the peers' environment. A line of output is the number of seconds, or with `vectors` the
vectors themselves.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

Embed = Callable[[list[str]], np.ndarray]
_PROVIDER = {"provider": "CPUExecutionProvider"}


def load(side: str, model: Path, work: Path) -> Embed:
    """Return a peer's function; `side` is its name, perhaps with a batch size after a comma."""
    name, _, size = side.partition(", batches of ")
    batch = int(size or 32)  # 32: SentenceTransformers' default
    if name == "fastembed":
        return of_fastembed(model, onnx(model, work), work / "fastembed")
    if name == "sentence-transformers":
        encoder = SentenceTransformer(str(model), device="cpu")
    elif name.startswith("OpenVINO"):
        hint = {"OpenVINO float32": "f32", "OpenVINO bfloat16": "bf16"}[name]
        encoder = SentenceTransformer(str(openvino(model, work)), backend="openvino", model_kwargs={
            "ov_config": {"INFERENCE_PRECISION_HINT": hint}})
    else:
        file = {"ONNX O3": "model_O3.onnx", "ONNX int8": "model_qint8_avx512_vnni.onnx"}[name]
        encoder = SentenceTransformer(str(onnx(model, work)), backend="onnx",
                                      model_kwargs={**_PROVIDER, "file_name": file})
    return lambda texts: np.asarray(encoder.encode(texts, batch_size=batch))


def of_fastembed(model: Path, exported: Path, directory: Path) -> Embed:
    """Load the exported graph with the model's own tokenizer, which truncates after 512 tokens."""
    from fastembed import TextEmbedding

    directory.mkdir(exist_ok=True)
    shutil.copy(exported / "onnx" / "model.onnx", directory)
    for path in [*model.glob("*.json"), model / "vocab.txt"]:
        shutil.copy(path, directory)
    encoder = TextEmbedding("sentence-transformers/all-MiniLM-L6-v2",
                            specific_model_path=str(directory))
    return lambda texts: np.array(list(encoder.embed(texts)))


def onnx(model: Path, work: Path) -> Path:
    """Export to ONNX, optimize (O3) and quantize, once."""
    from sentence_transformers import (
        export_dynamic_quantized_onnx_model,
        export_optimized_onnx_model,
    )

    directory = work / "onnx"
    if not directory.is_dir():
        encoder = SentenceTransformer(str(model), backend="onnx",
                                      model_kwargs={**_PROVIDER, "export": True})
        encoder.save_pretrained(str(directory))
        export_optimized_onnx_model(encoder, "O3", str(directory))
        export_dynamic_quantized_onnx_model(encoder, "avx512_vnni", str(directory))
    return directory


def openvino(model: Path, work: Path) -> Path:
    """Export to OpenVINO's format, once."""
    directory = work / "openvino"
    if not directory.is_dir():
        encoder: Any = SentenceTransformer(str(model), backend="openvino",
                                           model_kwargs={"export": True})
        encoder.save_pretrained(str(directory))
    return directory


def main() -> None:
    side, model, work = sys.argv[1:]
    embed = load(side, Path(model), Path(work))
    print("loaded", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        vectors = embed(request["texts"])
        seconds = time.perf_counter() - start
        print(json.dumps(vectors.tolist() if request.get("vectors") else seconds), flush=True)


if __name__ == "__main__":
    main()
