"""GPU tests need llmc-cuda and a GPU; they report which is missing."""

import pytest

from llmc.errors import LlmcError
from llmc.runtime.core import llm
from llmc.runtime.engines import cuda


@pytest.fixture(scope="session", autouse=True)
def many_models_on_a_gpu():
    """Limit GPU memory, as tests run concurrently."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (llm.LLM, llm.AsyncLLM):
            patch.setitem(kind.__init__.__kwdefaults__, "kv_cache_tokens", 2**15)
        yield


@pytest.fixture(scope="session")
def extension(extension):
    try:
        cuda.device_count()
    except LlmcError as error:
        pytest.skip(str(error))
    return extension
