"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from llmc.errors import LlmcError

Command = TypeVar("Command", bound=Callable[..., Any])


def completes(*values: str) -> Callable[..., list[CompletionItem]]:
    """Shell completion of an option's values; the command itself rejects unknown values."""
    return lambda ctx, param, incomplete: [CompletionItem(value) for value in values
                                           if value.startswith(incomplete)]


def case_options(command: Command) -> Command:
    """Add the argument DIR and its alias --case_dir."""
    path = click.Path(path_type=Path, file_okay=False)
    command = click.option("--case_dir", type=path, default=None,
                           help="DIR, as an option.")(command)
    return click.argument("directory", type=path, required=False, metavar="[DIR]")(command)


def require_case_dir(directory: Path | None, case_dir: Path | None) -> Path:
    """The case directory from DIR or --case_dir; an error where both are absent."""
    found = select_case_dir(directory, case_dir)
    if found is None:
        raise LlmcError("there is no case directory; give DIR, which `llmc compile` made")
    return found


def select_case_dir(directory: Path | None, case_dir: Path | None) -> Path | None:
    """The case directory from DIR or --case_dir; None where both are absent."""
    if directory is not None and case_dir is not None and \
            directory.resolve() != case_dir.resolve():
        raise LlmcError(f"DIR is '{directory}' and --case_dir '{case_dir}'; give one of them")
    return directory if case_dir is None else case_dir


json_option = click.option("--json", "as_json", is_flag=True,
                           help="Print results as JSON on stdout, and errors as JSON on stderr.")


def _devices(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise LlmcError(f"--device '{value}' is not a list of numbers such as 0,1,2,3") from None


device_option = click.option("--device", callback=_devices, metavar="0,1,…",
                             help="Devices to run on; each tp_size of them are a replica.  "
                                  "[default: one replica on all cores]")


# Arguments of `LLM`, by name.
LOADING_OPTIONS: dict[str, dict[str, Any]] = {
    "max_batch_size": dict(type=int, help="Maximum number of sequences that a replica decodes at "
                                          "once.  [default: 16, or what it was compiled for]"),
    "max_num_batched_tokens": dict(default=2048, help="Maximum number of tokens of a step; longer "
                                                      "prompts are prefilled in chunks."),
    "block_size": dict(default=16, help="Positions of a block of the KV cache."),
    "kv_cache_tokens": dict(type=int, help="Positions of the whole KV cache.  [default: as many "
                                           "as there is memory for]"),
    "gpu_memory_utilization": dict(default=0.9, help="Fraction of a GPU's memory to use."),
    "attention_backend": dict(metavar="vanilla|llmc|cudnn|fastest",
                              shell_complete=completes("vanilla", "llmc", "cudnn", "fastest"),
                              help="Attention kernels, for target cuda.  [default: fastest]"),
    "prefix_reuse": dict(default=True, is_flag=True,
                         help="Prefix caching: sequences share the blocks of a common prefix."),
    "check_step": dict(default=2, help="Maximum number of in-flight steps on a GPU."),
    "skip_step": dict(default=0, help="Tokens of each sequence that a GPU makes before the host "
                                      "reads the first."),
}


def loading_options(command: Command) -> Command:
    """Add LOADING_OPTIONS to a command."""
    for name, given in reversed(LOADING_OPTIONS.items()):
        flag = f"--{name}/--no_{name}" if given.get("is_flag") else f"--{name}"
        command = click.option(flag, **{key: value for key, value in given.items()
                                        if key != "is_flag"})(command)
    return command


def pop_loading_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of LOADING_OPTIONS from `options`, and return them."""
    return {name: options.pop(name) for name in LOADING_OPTIONS}
