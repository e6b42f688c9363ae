"""Frontend: a Hugging Face, GGUF or ONNX model to a raw graph with lazy weights."""

from __future__ import annotations

from pathlib import Path

from llmc.compiler.frontend.raw import Check, RawModel, unchecked
from llmc.compiler.frontend.scoring import BY_CHECKPOINT, Scoring
from llmc.errors import LlmcError

__all__ = ["Check", "RawModel", "load"]


def load(model: str | Path, *, hf_dir: str | Path | None = None, trust_remote_code: bool = False,
         allow_pickle: bool = False, revision: str | None = None,
         check: Check = unchecked, mtp: bool = False, task: str = "",
         pooling: str = "", scoring: Scoring = BY_CHECKPOINT,
         takes_embeds: bool = False, takes_media: bool = False) -> RawModel:
    """Read a model.

    Args:
        model: a Hugging Face directory, a hub id, a .gguf file, or an .onnx file.
        hf_dir: for an .onnx file, the directory with its config.json and tokenizer.
        trust_remote_code: run code that comes with the model.
        allow_pickle: read .bin checkpoints with torch.load.
        revision: branch, tag or commit of a hub id.
        check: called before the export, see `Check`.
        mtp: whether to export the model's MTP layer as its draft model.
        task: what to compile the model for; "": as the checkpoint says.
        pooling: of its hidden states; "": as the checkpoint says.
        scoring: of pairs of texts.
        takes_embeds: whether rows may replace the token embeddings.
        takes_media: whether to export encoders of images and audio of a model that has a processor.

    Raises:
        LlmcError: the model is missing, incomplete, or its architecture is unknown.
    """
    path = Path(model)
    if revision is not None and (path.exists() or path.suffix in (".gguf", ".onnx")):
        raise LlmcError(f"revision '{revision}' is given, but '{model}' is a local path; leave it "
                        f"out, or give a hub id like 'org/name'")
    if hf_dir is not None and path.suffix != ".onnx":
        raise LlmcError(f"hf_dir '{hf_dir}' is given, but '{model}' is not an .onnx file; leave it "
                        f"out, as the model has its own config.json and tokenizer")
    if mtp and path.suffix in (".gguf", ".onnx"):
        raise LlmcError(f"'{model}' is a {path.suffix} file, which --draft mtp does not support; "
                        f"give a Hugging Face directory")
    pooled = pooling or scoring != BY_CHECKPOINT or task not in ("", "generate")
    if pooled and path.suffix in (".gguf", ".onnx"):
        raise LlmcError(f"'{model}' is a {path.suffix} file, which --task {task or 'embed'} does "
                        f"not support; give a Hugging Face directory")
    if takes_embeds and path.suffix == ".onnx":
        raise LlmcError(f"'{model}' is an .onnx file, which --enable_prompt_embeds does not "
                        f"support; give a Hugging Face directory")
    if path.suffix == ".gguf":
        from llmc.compiler.frontend.gguf_file import load_gguf
        return load_gguf(_existing(path), check, takes_embeds=takes_embeds)
    if path.suffix == ".onnx":
        from llmc.compiler.frontend.onnx_file import load_onnx
        if hf_dir is None:
            raise LlmcError(f"'{path}' is given without --hf_dir; give the Hugging Face directory "
                            f"with its config.json and tokenizer")
        return load_onnx(_existing(path), Path(hf_dir), check)
    from llmc.compiler.frontend.huggingface import load_huggingface
    return load_huggingface(model, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle,
                            revision=revision, check=check, mtp=mtp, task=task, pooling=pooling,
                            scoring=scoring, takes_embeds=takes_embeds,
                            takes_media=takes_media)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise LlmcError(f"'{path}' does not exist; give the path of a file")
    return path
