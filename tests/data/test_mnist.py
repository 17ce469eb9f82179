from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_files import WEB_PAGE, FileServer, SmallMnist, idx_bytes

from mamba_cli.data import mnist
from mamba_cli.data.idx import IdxFile
from mamba_cli.data.mnist import load_mnist
from mamba_cli.errors import DataError

REAL = Path(os.environ.get("MAMBA_DATA_DIR", Path(__file__).parents[3] / "shared" / "data"))
needs_mnist = pytest.mark.skipif(
    not (REAL / "mnist" / "train-images-idx3-ubyte.gz").is_file(),
    reason=f"the MNIST files are not in {REAL / 'mnist'} (set MAMBA_DATA_DIR)",
)


@pytest.fixture
def small() -> SmallMnist:
    return SmallMnist.make()


def assert_equal_to(loaded: mnist.Mnist, small: SmallMnist) -> None:
    for array, original in zip(loaded, small.arrays, strict=True):
        assert array.dtype == np.uint8
        np.testing.assert_array_equal(array, original.reshape(array.shape))
    assert loaded.train_images.shape == (12, 12)
    assert loaded.test_labels.shape == (5,)


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
@pytest.mark.parametrize("compressed", [True, False])
def test_files_are_read_in_place(
    tmp_path: Path, small: SmallMnist, folder: str, compressed: bool
) -> None:
    small.write(tmp_path / folder, compressed)
    assert_equal_to(load_mnist(tmp_path, mirrors=(), files=small.files), small)


def test_missing_files_are_downloaded_once(
    tmp_path: Path, small: SmallMnist, server: FileServer
) -> None:
    small.write(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels.gz").unlink()
    wrapped_differently = gzip.compress(small.contents["t10k-labels"], compresslevel=1)
    server.contents["/base/t10k-labels.gz"] = wrapped_differently
    for _ in range(2):
        loaded = load_mnist(tmp_path, mirrors=(f"{server.address}base/",), files=small.files)
        assert_equal_to(loaded, small)
    assert dict(server.requests) == {"/base/t10k-labels.gz": 1}


def test_without_data_dir_the_cache_is_used(
    tmp_path: Path, small: SmallMnist, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, content in small.contents.items():
        server.contents[f"/{name}.gz"] = gzip.compress(content)
    assert_equal_to(load_mnist(mirrors=(server.address,), files=small.files), small)
    assert (tmp_path / "mamba-cli" / "mnist" / "train-images.gz").is_file()


def test_missing_everywhere_names_files_hashes_addresses_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_mnist(tmp_path, mirrors=("http://127.0.0.1:9/one/", "http://127.0.0.1:9/two/"))
    message = str(caught.value)
    assert "http://127.0.0.1:9/one/train-images-idx3-ubyte.gz" in message
    assert "http://127.0.0.1:9/two/train-images-idx3-ubyte.gz" in message
    assert str(tmp_path / "mnist") in message
    for file in mnist.PUBLISHED:
        assert f"{file.name}.gz" in message
        assert str(file.md5) in message


def flip_a_pixel(content: bytes) -> bytes:
    return content[:40] + bytes([content[40] ^ 1]) + content[41:]


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda content: gzip.compress(content)[:-20], "damaged gzip"),
        (lambda content: gzip.compress(content)[:-8] + b"\0" * 8, "damaged gzip"),
        (lambda content: WEB_PAGE, "a web page"),
        (lambda content: b"", "an empty file"),
        (lambda content: b"PK\x03\x04 an archive", "50 4b 03 04"),
        (lambda content: gzip.compress(WEB_PAGE), "wrong magic number: expected 2051"),
        (lambda content: gzip.compress(b"\0" * 5), "truncated: expected 160 bytes, found 5 bytes"),
        (
            lambda content: gzip.compress(idx_bytes(np.zeros(144, np.uint8))),
            "wrong magic number: expected 2051, found 2049",
        ),
        (
            lambda content: gzip.compress(idx_bytes(np.zeros((12, 3, 4), np.uint8), type_code=9)),
            "wrong magic number: expected 2051, found 2307",
        ),
        (
            lambda content: gzip.compress(idx_bytes(np.zeros((12, 4, 3), np.uint8))),
            "expected 12 x 3 x 4, found 12 x 4 x 3",
        ),
        (lambda content: gzip.compress(content[:-1]), "expected 160 bytes, found 159 bytes"),
        (lambda content: gzip.compress(content + b"\0" * 9), "found 161 bytes or more"),
        (lambda content: gzip.compress(flip_a_pixel(content)), "found MD5 "),
    ],
)
def test_a_bad_file_is_named_with_what_was_found(
    tmp_path: Path, small: SmallMnist, damage: Callable[[bytes], bytes], found: str
) -> None:
    small.write(tmp_path / "mnist")
    path = tmp_path / "mnist" / "train-images.gz"
    path.write_bytes(damage(small.contents["train-images"]))
    with pytest.raises(DataError) as caught:
        load_mnist(tmp_path, mirrors=(), files=small.files)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert found in message
    assert "expected" in message
    assert "Remove the file" in message


def test_a_web_page_under_a_plain_name_is_refused(tmp_path: Path, small: SmallMnist) -> None:
    small.write(tmp_path, compressed=False)
    (tmp_path / "train-images").write_bytes(WEB_PAGE)
    with pytest.raises(DataError, match="a web page"):
        load_mnist(tmp_path, mirrors=(), files=small.files)


def test_a_label_out_of_range_is_refused(tmp_path: Path, small: SmallMnist) -> None:
    small.write(tmp_path)
    labels = small.arrays[1].copy()
    labels[3] = 10
    (tmp_path / "train-labels.gz").write_bytes(gzip.compress(idx_bytes(labels)))
    assert small.files is not None
    unhashed = small.files._replace(train_labels=IdxFile("train-labels", (12,), None))
    with pytest.raises(DataError, match="expected 0 to 9, found 10 in row 3"):
        load_mnist(tmp_path, mirrors=(), files=unhashed)


def test_the_published_sizes() -> None:
    assert [file.num_bytes for file in mnist.PUBLISHED] == [47_040_016, 60_008, 7_840_016, 10_008]
    assert [file.magic for file in mnist.PUBLISHED] == [2051, 2049, 2051, 2049]
    assert len(mnist.MIRRORS) >= 2
    assert all(m.startswith("https://") and m.endswith("/") for m in mnist.MIRRORS)


@needs_mnist
def test_the_published_digits() -> None:
    data = load_mnist(REAL, mirrors=())
    # Digits per class as published with the data set.
    train_counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    test_counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert np.bincount(data.train_labels).tolist() == train_counts
    assert np.bincount(data.test_labels).tolist() == test_counts
    # The mean pixel that everyone normalises by.
    assert abs(data.train_images.mean() / 255 - 0.1307) < 5e-5
    assert data.train_images.nbytes == 60_000 * 784
