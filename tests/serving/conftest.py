"""One small engine for all servers of these tests: what takes long is compiling it."""

import pytest

from tests.serving.server.live_server import small_engine


@pytest.fixture(scope="session")
def engine():
    return small_engine()
