"""One small engine for all server tests, since compilation takes most of their time."""

import pytest

from tests.serving.server.live_server import small_engine


@pytest.fixture(scope="session")
def engine():
    return small_engine()
