"""A server that tests share."""

import pytest
from server_process import serving


@pytest.fixture(scope="session")
def server(case_tp1):
    with serving(case_tp1, "--allow_priority") as own:
        yield own


@pytest.fixture(scope="session")
def client(server):
    return server.client
