from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import requests
from small_files import WEB_PAGE, FileServer

from mamba_cli.data import download
from mamba_cli.errors import DataError

CONTENT = bytes(range(256)) * 40
EXPECTED = "numbers.bin (MD5 0123)"


def verify(path: Path) -> None:
    found = path.read_bytes()
    if found != CONTENT:
        raise DataError(f"{path}: expected the numbers, found {download.describe_content(found)}")


def fetch(folder: Path, *servers: FileServer) -> Path:
    addresses = [f"{each.address}numbers.bin" for each in servers]
    return download.fetch("numbers.bin", addresses, folder, verify, EXPECTED)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_file_arrives_under_its_name_and_nothing_else_is_left(
    tmp_path: Path, server: FileServer
) -> None:
    server.contents["/numbers.bin"] = CONTENT
    path = fetch(tmp_path / "new" / "folder", server)
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]


def test_the_mirror_is_asked_when_the_first_address_lacks_the_file(
    tmp_path: Path, server: FileServer, mirror: FileServer
) -> None:
    mirror.contents["/numbers.bin"] = CONTENT
    assert fetch(tmp_path, server, mirror).read_bytes() == CONTENT
    assert server.requests["/numbers.bin"] == mirror.requests["/numbers.bin"] == 1


def test_a_server_in_trouble_is_asked_again(tmp_path: Path, server: FileServer) -> None:
    server.contents["/numbers.bin"] = CONTENT
    server.statuses["/numbers.bin"] = [503, 429]
    assert fetch(tmp_path, server).read_bytes() == CONTENT
    assert server.requests["/numbers.bin"] == 3


def test_retries_are_bounded(tmp_path: Path, server: FileServer, mirror: FileServer) -> None:
    server.statuses["/numbers.bin"] = [500] * 100
    with pytest.raises(DataError, match="status 500") as caught:
        fetch(tmp_path, server, mirror)
    assert "status 404" in str(caught.value)
    assert server.requests["/numbers.bin"] == download.ROUNDS
    assert mirror.requests["/numbers.bin"] == 1, "an address without the file is not asked again"


def test_a_web_page_in_place_of_the_file_is_refused_for_the_mirror(
    tmp_path: Path, server: FileServer, mirror: FileServer
) -> None:
    server.contents["/numbers.bin"] = WEB_PAGE
    mirror.contents["/numbers.bin"] = CONTENT
    assert fetch(tmp_path, server, mirror).read_bytes() == CONTENT
    with pytest.raises(DataError, match="a web page"):
        fetch(tmp_path / "other", server)
    assert not (tmp_path / "other").exists()


def test_a_transfer_that_breaks_off_leaves_no_file(tmp_path: Path, server: FileServer) -> None:
    server.contents["/numbers.bin"] = CONTENT
    server.truncate = True
    with pytest.raises(DataError, match="could not be downloaded"):
        fetch(tmp_path, server)
    assert server.requests["/numbers.bin"] == download.ROUNDS
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_message_says_what_to_put_where(tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{closed_port()}/numbers.bin"
    folder = tmp_path / "absent" / "mnist"
    with pytest.raises(DataError) as caught:
        download.fetch("numbers.bin", [address], folder, verify, EXPECTED)
    message = str(caught.value)
    assert caught.value.exit_code == 3
    for part in (address, EXPECTED, str(folder), "refused", "MAMBA_DATA_DIR"):
        assert part in message
    assert list(tmp_path.iterdir()) == [], "a mistyped data_dir leaves no folders behind"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, server: FileServer) -> None:
    server.contents["/numbers.bin"] = CONTENT
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write numbers\.bin into .*file.mnist"):
        fetch(tmp_path / "file" / "mnist", server)


def test_certificates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def refuse(url: str, **arguments: Any) -> None:
        asked.append(arguments)
        raise requests.exceptions.SSLError("certificate verify failed")

    monkeypatch.setattr(requests, "get", refuse)
    with pytest.raises(DataError, match="certificate verify failed"):
        download.fetch("numbers.bin", ["https://127.0.0.1/x"], tmp_path, verify, EXPECTED)
    assert len(asked) == download.ROUNDS
    assert all(arguments.get("verify", True) is True for arguments in asked)
    assert all(arguments["timeout"] == download.TIMEOUT_S for arguments in asked)


def test_two_first_runs_side_by_side_never_show_half_a_file(
    tmp_path: Path, server: FileServer
) -> None:
    server.contents["/numbers.bin"] = CONTENT
    server.delay_s = 0.15
    runs = [threading.Thread(target=fetch, args=(tmp_path, server)) for _ in range(2)]
    runs[0].start()
    threading.Event().wait(0.05)
    runs[1].start()
    seen_whole = 0
    while any(run.is_alive() for run in runs):
        target = tmp_path / "numbers.bin"
        if target.exists():
            assert target.read_bytes() == CONTENT
            seen_whole += 1
    assert seen_whole > 0, "the first run ends while the second is under way"
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.bin"]
    assert server.requests["/numbers.bin"] == 2


def test_data_dir_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        download.resolve_data_dir(tmp_path / "file")
    assert download.resolve_data_dir(tmp_path) == tmp_path


def test_the_cache_belongs_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert download.resolve_data_dir(None) == download.cache_dir()
    assert download.cache_dir().name == "mamba-cli"
