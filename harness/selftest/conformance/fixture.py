"""The suite as a pytest fixture: import `conformance_server` in a test module or conftest.py."""

from collections.abc import Iterator

import pytest

from .process import ConformanceServer


@pytest.fixture(scope="session")
def conformance_server() -> Iterator[ConformanceServer]:
    """One server that plays every case at server.url(CASE); server.new_truths() says what was played."""
    with ConformanceServer() as server:
        yield server
