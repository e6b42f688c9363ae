"""The vLLM release that this plugin is written for."""

from __future__ import annotations

from importlib.metadata import version

from llmc.errors import LlmcError

VLLM = "0.32"


def is_supported(installed: str | None = None) -> bool:
    """Whether a vLLM release has the internals that the plugin uses.

    Args:
        installed: its version, such as `0.32.1+cpu`; None: the installed one.
    """
    return f"{installed or version('vllm')}.".startswith(f"{VLLM}.")


def check_release(installed: str | None = None) -> None:
    """Refuse a vLLM release that is not supported.

    Raises:
        LlmcError: it names the release and the one to install.
    """
    if not is_supported(installed):
        raise LlmcError(f"llmc-vllm is for vLLM {VLLM}, and vLLM {installed or version('vllm')} is "
                        f"installed; install it with: pip install 'vllm=={VLLM}.*'")
