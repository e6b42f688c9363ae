"""llmc inside vLLM: `vllm serve CASE_DIR` and `vllm.LLM(CASE_DIR)`.

vLLM finds these two functions by their entry points, in each of its processes. They import vLLM
only when it calls them.
"""

from __future__ import annotations


def find_platform() -> str | None:
    """The platform of a machine on which vLLM knows no device; None where it does."""
    from vllm.platforms import builtin_platform_plugins

    if any(find() for find in builtin_platform_plugins.values()):
        return None
    return "llmc_vllm.platform.LlmcPlatform"


def register() -> None:
    """Have vLLM take case directories for models. What it does with others stays as it is."""
    from llmc_vllm import hooks

    hooks.install()
