"""Data sets of a few rows in the published formats, and a server that hands files out."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mamba_cli.data.idx import IdxFile
from mamba_cli.data.mnist import MnistFiles
from mamba_cli.data.movielens import MovieLensFiles

WEB_PAGE = b"<!DOCTYPE html>\n<html><body>Sign in to the network</body></html>\n"


def idx_bytes(array: NDArray[np.uint8], type_code: int = 8) -> bytes:
    """An IDX file, written from the format's description."""
    header = bytes([0, 0, type_code, array.ndim]) + b"".join(
        struct.pack(">I", size) for size in array.shape
    )
    return header + array.tobytes()


@dataclass
class SmallMnist:
    """Twelve training and five test images of 3 x 4 pixels."""

    contents: dict[str, bytes] = field(default_factory=dict)
    arrays: list[NDArray[np.uint8]] = field(default_factory=list)
    files: MnistFiles | None = None

    @classmethod
    def make(cls) -> SmallMnist:
        rng = np.random.default_rng(0)
        names = MnistFiles("train-images", "train-labels", "t10k-images", "t10k-labels")  # type: ignore[arg-type]
        small = cls()
        expected = []
        for name, shape, bound in zip(
            names, [(12, 3, 4), (12,), (5, 3, 4), (5,)], [256, 10, 256, 10], strict=True
        ):
            array = rng.integers(0, bound, shape).astype(np.uint8)
            content = idx_bytes(array)
            small.arrays.append(array)
            small.contents[str(name)] = content
            expected.append(IdxFile(str(name), shape, hashlib.md5(content).hexdigest()))
        small.files = MnistFiles(*expected)
        return small

    def write(self, folder: Path, compressed: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.contents.items():
            if compressed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


@dataclass
class SmallMovieLens:
    """25 ratings by six users of seven items, in five folds of five test ratings."""

    contents: dict[str, bytes] = field(default_factory=dict)
    table: NDArray[np.int64] | None = None

    @classmethod
    def make(cls) -> SmallMovieLens:
        rng = np.random.default_rng(1)
        cells = rng.permutation(6 * 7)[:25]
        table = np.stack(
            [cells // 7 + 1, cells % 7 + 1, rng.integers(1, 6, 25), 880_000_000 + cells], axis=1
        )
        small = cls(table=table)
        small.contents["u.data"] = table_bytes(table)
        for fold in range(1, 6):
            in_test = np.arange(25) // 5 == fold - 1
            small.contents[f"u{fold}.base"] = table_bytes(table[~in_test])
            small.contents[f"u{fold}.test"] = table_bytes(table[in_test])
        return small

    @property
    def archive(self) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in self.contents.items():
                archive.writestr(zipfile.ZipInfo(f"ml-100k/{name}"), content)
        return buffer.getvalue()

    @property
    def files(self) -> MovieLensFiles:
        return MovieLensFiles(6, 7, 25, hashlib.md5(self.archive).hexdigest())

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.contents.items():
            (folder / name).write_bytes(content)


def table_bytes(table: NDArray[np.int64]) -> bytes:
    """Tab-separated rows, each ended by a newline."""
    return "".join("\t".join(map(str, row)) + "\n" for row in table).encode()


class FileServer:
    """Serves ``contents`` on 127.0.0.1 and counts what is asked for.

    ``statuses[path]`` are the answers to give before the content, one per request;
    ``truncate`` promises more bytes than it sends; ``delay_s`` lies between the halves.
    """

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.statuses: dict[str, list[int]] = {}
        self.truncate = False
        self.delay_s = 0.0
        self.requests: Counter[str] = Counter()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/"

    def __enter__(self) -> FileServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(outer) -> Callable[..., BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests[self.path] += 1
                planned = outer.statuses.get(self.path, [])
                content = outer.contents.get(self.path)
                if planned or content is None:
                    self.send_error(planned.pop(0) if planned else 404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content) + 7 * outer.truncate))
                self.end_headers()
                half = len(content) // 2
                self.wfile.write(content[:half])
                self.wfile.flush()
                time.sleep(outer.delay_s)
                self.wfile.write(content[half:])

            def log_message(self, *_: Any) -> None: ...

        return Handler
