"""A small server that speaks OpenAI's API, for the commands that ask one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch.cli.fake_api import FakeApi


@pytest.fixture(scope="module")
def server() -> Iterator[FakeApi]:
    with FakeApi() as server:
        yield server


@pytest.fixture
def api(server: FakeApi) -> FakeApi:
    """The server, without any memory of earlier tests."""
    server.forget()
    return server
