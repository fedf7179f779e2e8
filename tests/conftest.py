"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """The bundled demo served with `--rserve`, one for the whole session; `live_server` starts one with other flags."""
    with live_server("--rserve") as running:
        yield running
