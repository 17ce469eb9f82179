from __future__ import annotations

from collections.abc import Iterator

import pytest
from small_files import FileServer

from mamba_cli.data import download


@pytest.fixture(autouse=True)
def no_waiting_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSE_S", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer() as running:
        yield running


@pytest.fixture
def mirror() -> Iterator[FileServer]:
    with FileServer() as running:
        yield running
