"""The supported release of vLLM."""

from __future__ import annotations

from importlib.metadata import version

from llmc.errors import LlmcError

VLLM = "0.32"


def is_supported(installed: str | None = None) -> bool:
    """Whether a vLLM release has the internals that the plugin uses.

    Args:
        installed: version of vLLM, such as `0.32.1+cpu`; None: the installed version.
    """
    return f"{installed or version('vllm')}.".startswith(f"{VLLM}.")


def check_release(installed: str | None = None) -> None:
    """Reject an unsupported release of vLLM.

    Raises:
        LlmcError: the message has the installed and the supported release.
    """
    if not is_supported(installed):
        raise LlmcError(f"vLLM {installed or version('vllm')} is installed, but llmc-vllm requires "
                        f"vLLM {VLLM}; install it with: pip install 'vllm=={VLLM}.*'")
