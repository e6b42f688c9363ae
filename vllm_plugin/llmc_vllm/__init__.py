"""llmc inside vLLM: `vllm serve CASE_DIR` and `vllm.LLM(CASE_DIR)`.

vLLM finds these two functions by entry points, in each of its processes. They import vLLM only
when they are called.
"""

from __future__ import annotations


def find_platform() -> str | None:
    """Return llmc's platform if vLLM supports no device of this host; else None."""
    from vllm.platforms import builtin_platform_plugins

    if any(find() for find in builtin_platform_plugins.values()):
        return None
    return "llmc_vllm.platform.LlmcPlatform"


def register() -> None:
    """Make vLLM accept case directories as models; other models are not affected."""
    from llmc_vllm import hooks

    hooks.install()
