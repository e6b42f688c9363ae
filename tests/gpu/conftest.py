"""GPU tests need llmc's CUDA extension and a GPU; they say which is missing."""

import pytest

from llmc.errors import LlmcError
from llmc.runtime.engines import cuda


@pytest.fixture(scope="session")
def extension():
    try:
        cuda.device_count()
        return cuda.extension()
    except LlmcError as error:
        pytest.skip(str(error))
