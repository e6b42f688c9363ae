"""Import of the compiler, an optional dependency that takes seconds to import."""

from __future__ import annotations

import atexit
import gc
from types import ModuleType

from llmc.errors import LlmcError
from llmc.installation import install_command


def import_compiler() -> ModuleType:
    """Import `llmc.compiler.api`.

    Raises:
        LlmcError: a package is missing; the message has the command that installs it.
    """
    _freeze_imported_modules()
    try:
        from llmc.compiler import api
    except ModuleNotFoundError as error:
        raise LlmcError(f"the compiler needs {error.name}; install it with: "
                        f"{install_command('export')}") from error
    return api


def _freeze_imported_modules() -> None:
    """Keep the garbage collector off torch's and transformers' modules.

    Traversing them repeatedly, and once more at exit, takes as long as a small model's export.
    """
    gc.set_threshold(100_000, 50, 50)
    atexit.register(gc.freeze)
