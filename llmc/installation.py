"""Distribution names, and the commands that install optional parts."""

from __future__ import annotations

from llmc import __version__

# `llmc` on PyPI is another project.
DISTRIBUTION = "llmc-aot"
CUDA_INSTALL_COMMAND = "pip install -v ./csrc"


def install_command(extra: str) -> str:
    """Return the command that installs an extra, for a checkout and for a wheel.

    Args:
        extra: a key of `[project.optional-dependencies]`, such as `serve`.
    """
    wheel = f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"
    return f"pip install '.[{extra}]' in a checkout of llmc, or pip install './{wheel}[{extra}]'"
