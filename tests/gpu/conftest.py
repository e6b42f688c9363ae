"""GPU tests need llmc-cuda and a GPU; they say which is missing."""

import pytest

from llmc.errors import LlmcError
from llmc.runtime.engines import cuda


@pytest.fixture(scope="session")
def extension(extension):
    try:
        cuda.device_count()
    except LlmcError as error:
        pytest.skip(str(error))
    return extension
