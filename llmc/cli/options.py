"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from llmc.errors import LlmcError

Command = TypeVar("Command", bound=Callable[..., Any])


def completes(*values: str) -> Callable[..., list[CompletionItem]]:
    """Shell completion of an option's values; the command checks the value itself."""
    return lambda ctx, param, incomplete: [CompletionItem(value) for value in values
                                           if value.startswith(incomplete)]


def case_options(command: Command) -> Command:
    """Add the argument DIR and its alias --case_dir."""
    path = click.Path(path_type=Path, file_okay=False)
    command = click.option("--case_dir", type=path, default=None,
                           help="Case directory, as an option instead of DIR.")(command)
    return click.argument("directory", type=path, required=False, metavar="[DIR]")(command)


def require_case_dir(directory: Path | None, case_dir: Path | None) -> Path:
    """Return the case directory from DIR or --case_dir.

    Raises:
        LlmcError: neither is given, or they differ.
    """
    found = select_case_dir(directory, case_dir)
    if found is None:
        raise LlmcError("no case directory is given; give DIR, the output of `llmc compile`")
    return found


def select_case_dir(directory: Path | None, case_dir: Path | None) -> Path | None:
    """Return the case directory from DIR or --case_dir; None if neither is given."""
    if directory is not None and case_dir is not None and \
            directory.resolve() != case_dir.resolve():
        raise LlmcError(f"DIR is '{directory}' and --case_dir is '{case_dir}'; give only one")
    return directory if case_dir is None else case_dir


json_option = click.option("--json", "as_json", is_flag=True,
                           help="Print results as JSON on stdout, and errors as JSON on stderr.")


def _devices(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise LlmcError(f"--device is '{value}', expected integers; give a list such as "
                        f"0,1,2,3") from None


device_option = click.option("--device", callback=_devices, metavar="0,1,…",
                             help="Device indices; each tp_size of them form a replica.  "
                                  "[default: one replica on all cores]")


def _draft_count(ctx: click.Context, param: click.Parameter, value: str) -> int | str:
    """Parse a number of drafts; `LLM` checks the range and other texts."""
    try:
        return int(value)
    except ValueError:
        return value


def _adapters(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> \
        dict[str, str]:
    """Parse NAME=DIR pairs."""
    adapters: dict[str, str] = {}
    for value in values:
        name, sign, path = value.partition("=")
        if not (name and sign and path):
            raise LlmcError(f"--lora_modules is '{value}', expected NAME=DIR, such as "
                            f"sql=adapters/sql")
        if name in adapters:
            raise LlmcError(f"--lora_modules has two adapters named '{name}'; give each another")
        adapters[name] = path
    return adapters


adapters_option = click.option(
    "--lora_modules", "adapters", multiple=True, callback=_adapters, metavar="NAME=DIR",
    help="LoRA adapter that `llmc adapter` wrote, and its name as a model; may be repeated.")


# Arguments of `LLM`, by name.
LOADING_OPTIONS: dict[str, dict[str, Any]] = {
    "max_batch_size": dict(type=int, help="Maximum number of sequences per step of a replica.  "
                                          "[default: 16, or the compiled maximum]"),
    "max_num_batched_tokens": dict(type=int, help="Maximum number of tokens per step; longer "
                                                  "prompts use chunked prefill.  [default: 8192 "
                                                  "on target cuda, 2048 on others]"),
    "max_itl_ms": dict(type=float, help="Goal for the time between tokens: a step gets as many "
                                        "prompt tokens as fit."),
    "block_size": dict(default=16, help="Size of a KV-cache block, in tokens."),
    "kv_cache_tokens": dict(type=int, help="Capacity of the KV cache, in tokens.  [default: what "
                                           "fits into memory]"),
    "gpu_memory_utilization": dict(default=0.9, help="Fraction of each GPU's memory to use."),
    "attention_backend": dict(metavar="vanilla|llmc|cudnn|fastest",
                              shell_complete=completes("vanilla", "llmc", "cudnn", "fastest"),
                              help="Attention kernels of target cuda.  [default: fastest]"),
    "prefix_reuse": dict(default=True, is_flag=True,
                         help="Prefix caching: sequences share the blocks of a common prefix."),
    "speculate": dict(default="off", metavar="off|ngram|draft",
                      shell_complete=completes("off", "ngram", "draft"),
                      help="Speculative decoding: ngram drafts what followed the latest tokens "
                           "earlier in the sequence; draft: by the draft model that was compiled "
                           "with the model; off: only predicted outputs."),
    "num_speculative_tokens": dict(default="auto", metavar="K|auto", callback=_draft_count,
                                   shell_complete=completes("auto"),
                                   help="Drafts of a sequence per step, from 1 to 16; auto: as "
                                        "many as pay off."),
    "max_loras": dict(default=8, help="Maximum number of LoRA adapters per step."),
    "max_lora_rank": dict(type=int, help="Highest rank of an adapter, up to 256.  [default: that "
                                         "of the given ones, at least 16]"),
    "encoder_cache_gb": dict(default=1.0, help="Cache of the encoder outputs of images and audio, "
                                               "per replica, in GB; later prompts with an equal "
                                               "item reuse them."),
    "check_step": dict(default=2, help="Maximum number of in-flight steps per GPU."),
    "skip_step": dict(default=0, help="Number of tokens per sequence that a GPU samples before "
                                      "the host reads the first."),
}


def loading_options(command: Command) -> Command:
    """Add LOADING_OPTIONS to a command."""
    for name, given in reversed(LOADING_OPTIONS.items()):
        flag = f"--{name}/--no_{name}" if given.get("is_flag") else f"--{name}"
        command = click.option(flag, **{key: value for key, value in given.items()
                                        if key != "is_flag"})(command)
    return command


def pop_loading_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of LOADING_OPTIONS from `options` and return them."""
    return {name: options.pop(name) for name in LOADING_OPTIONS}
