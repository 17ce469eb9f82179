"""Fetching a published file: mirrors, bounded retries, verification, atomic arrival.

Certificates are always checked. A file gets its final name only after its content
has been verified, by a rename, so a reader never sees half a file and two first
runs side by side can only replace each other's file by an equal one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pooch
import requests

from mamba_cli.errors import DataError

logger = logging.getLogger(__name__)

ROUNDS = 3
"""How often every address is tried before giving up."""
PAUSE_S = 1.0
"""Wait before the second round; it doubles from round to round."""
TIMEOUT_S = (10.0, 60.0)
"""Seconds allowed to connect, and between two pieces of an answer."""
RETRIED_STATUS = (408, 429)
"""Refusals that pass: request timeout, too many requests."""

DataDir = str | os.PathLike[str] | None


def cache_dir() -> Path:
    """The per-user cache, where files go when no ``data_dir`` is named."""
    return Path(pooch.os_cache("mamba-cli"))


def resolve_data_dir(data_dir: DataDir) -> Path:
    """``data_dir`` if it is named, else the per-user cache.

    Raises
    ------
    DataError
        ``data_dir`` exists and is not a folder.
    """
    if data_dir is None or str(data_dir) == "":
        return cache_dir()
    root = Path(data_dir).expanduser()
    if root.exists() and not root.is_dir():
        raise DataError(f"data_dir={root} is a file; expected the folder that holds the data sets")
    return root


def first_existing(candidates: Iterable[Path]) -> Path | None:
    """The first of ``candidates`` that is a file."""
    return next((path for path in candidates if path.is_file()), None)


def describe_content(head: bytes) -> str:
    """What the first bytes of a file look like, for an error message."""
    if not head:
        return "an empty file"
    start = head[:512].lstrip().lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<body")):
        return "a web page (HTML or XML), not data"
    return f"a file that begins with the bytes {head[:4].hex(' ')}"


def fetch(
    file_name: str,
    addresses: Sequence[str],
    folder: Path,
    verify: Callable[[Path], object],
    expected: str,
) -> Path:
    """Download ``file_name`` into ``folder`` from the first address that has it.

    Every address is tried up to ``ROUNDS`` times, mirror by mirror, with a pause
    between rounds. An address that answers that it does not have the file (a 4xx
    status) is not asked again.

    Parameters
    ----------
    file_name
        Name the file gets in ``folder``.
    addresses
        Full addresses of the file, the preferred one first.
    verify
        Called with the path of what arrived, under a temporary name; raises
        ``DataError`` if it is not the expected content.
    expected
        The expected files and hashes in words, for the error message.

    Returns
    -------
    Path
        ``folder / file_name``, verified.

    Raises
    ------
    DataError
        No address delivered the expected content, or ``folder`` cannot be written.
    """
    target = folder / file_name
    partial = folder / f".{file_name}.{uuid.uuid4().hex}.part"
    new_folders = [each for each in (folder, *folder.parents) if not each.exists()]
    pending = list(addresses)
    failures: dict[str, str] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.touch()
        for attempt in range(ROUNDS):
            if attempt > 0 and pending:
                time.sleep(PAUSE_S * 2 ** (attempt - 1))
            for address in list(pending):
                try:
                    _download(address, partial)
                    verify(partial)
                except requests.HTTPError as error:
                    status = 0 if error.response is None else error.response.status_code
                    failures[address] = f"answered with status {status}"
                    if 400 <= status < 500 and status not in RETRIED_STATUS:
                        pending.remove(address)
                except requests.RequestException as error:
                    failures[address] = _reason(error)
                except DataError as error:
                    failures[address] = f"delivered something else: {error}"
                else:
                    os.replace(partial, target)
                    return target
    except OSError as error:
        raise DataError(
            f"cannot write {file_name} into {folder}: {error.strerror or error}. "
            "Free space or permissions there, or point data_dir (MAMBA_DATA_DIR) to a folder "
            f"that can be written or that holds the files already. Expected: {expected}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    _remove_empty(new_folders)
    tried = "\n".join(f"  {address}: {failures[address]}" for address in addresses)
    raise DataError(
        f"{file_name} is not in {folder} and could not be downloaded.\nTried:\n{tried}\n"
        f"Expected: {expected}\n"
        f"Download the files from one of these addresses on a machine with a network and put "
        f"them in {folder}, or point data_dir (MAMBA_DATA_DIR) to a folder that holds them."
    )


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove what a failed download created, so that a mistyped ``data_dir`` leaves no trace."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def _download(address: str, path: Path) -> None:
    """One attempt; ``requests.RequestException`` on failure, certificates checked."""
    logger.info("downloading %s", address)
    downloader = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(), chunk_size=1 << 16, timeout=TIMEOUT_S
    )
    downloader(address, str(path), None)


def _reason(error: Exception) -> str:
    """A short reason: what urllib3 gave up on names the host and the trouble."""
    inner = error.args[0] if error.args else error
    text = " ".join(str(getattr(inner, "reason", inner)).split())
    return f"{type(error).__name__} ({text[:300]})"
