from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from small_files import WEB_PAGE, FileServer, SmallMovieLens, table_bytes

from mamba_cli.data import movielens
from mamba_cli.data.movielens import Fold, Ratings, load_movielens
from mamba_cli.errors import ConfigError, DataError

REAL = Path(os.environ.get("MAMBA_DATA_DIR", Path(__file__).parents[3] / "shared" / "data"))
needs_movielens = pytest.mark.skipif(
    not (REAL / "ml-100k" / "u.data").is_file(),
    reason=f"the MovieLens files are not in {REAL / 'ml-100k'} (set MAMBA_DATA_DIR)",
)


@pytest.fixture
def small() -> SmallMovieLens:
    return SmallMovieLens.make()


def load(data_dir: Path, small: SmallMovieLens, fold: int = 1) -> Fold:
    return load_movielens(fold, data_dir, addresses=(), files=small.files)


def assert_is_fold(loaded: Fold, small: SmallMovieLens, fold: int) -> None:
    assert small.table is not None
    in_test = np.arange(25) // 5 == fold - 1
    for part, rows in ((loaded.train, ~in_test), (loaded.test, in_test)):
        np.testing.assert_array_equal(part.users, small.table[rows, 0] - 1)
        np.testing.assert_array_equal(part.items, small.table[rows, 1] - 1)
        np.testing.assert_array_equal(part.ratings, small.table[rows, 2])
    assert (loaded.num_users, loaded.num_items) == (6, 7)


@pytest.mark.parametrize("folder", ["ml-100k", "."])
@pytest.mark.parametrize("fold", [1, 5])
def test_extracted_files_are_read_in_place(
    tmp_path: Path, small: SmallMovieLens, folder: str, fold: int
) -> None:
    small.write(tmp_path / folder)
    assert_is_fold(load(tmp_path, small, fold), small, fold)


@pytest.mark.parametrize("folder", ["ml-100k", "."])
def test_the_archive_is_read_without_extracting(
    tmp_path: Path, small: SmallMovieLens, folder: str
) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    archive = tmp_path / folder / "ml-100k.zip"
    archive.write_bytes(small.archive)
    assert_is_fold(load(tmp_path, small, 3), small, 3)
    assert list((tmp_path / folder).iterdir()) == [archive]


def test_the_archive_is_downloaded_once(
    tmp_path: Path, small: SmallMovieLens, server: FileServer
) -> None:
    server.contents["/ml-100k.zip"] = small.archive
    for fold in (1, 2):
        loaded = load_movielens(
            fold, tmp_path, addresses=(f"{server.address}ml-100k.zip",), files=small.files
        )
        assert_is_fold(loaded, small, fold)
    assert dict(server.requests) == {"/ml-100k.zip": 1}


def test_missing_everywhere_names_address_hash_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_movielens(2, tmp_path, addresses=("http://127.0.0.1:9/ml-100k.zip",))
    message = str(caught.value)
    expected = (
        "http://127.0.0.1:9/ml-100k.zip",
        "0e33842e24a9c977be4e0107933c0723",
        "u2.base",
        str(tmp_path),
    )
    for part in expected:
        assert part in message


@pytest.mark.parametrize("content", [WEB_PAGE, b"", b"PK\x03\x04 half an archive"])
def test_a_bad_archive_is_named_with_both_hashes(
    tmp_path: Path, small: SmallMovieLens, content: bytes
) -> None:
    archive = tmp_path / "ml-100k.zip"
    archive.write_bytes(content)
    with pytest.raises(DataError, match="wrong content") as caught:
        load(tmp_path, small)
    message = str(caught.value)
    assert message.startswith(str(archive))
    assert f"expected MD5 {small.files.archive_md5}, found MD5" in message
    assert ("a web page" in message) == (content == WEB_PAGE)


def test_an_archive_without_the_files_is_refused(tmp_path: Path, small: SmallMovieLens) -> None:
    del small.contents["u1.test"]
    (tmp_path / "ml-100k.zip").write_bytes(small.archive)
    with pytest.raises(DataError, match=r"cannot read ml-100k/u1\.test"):
        load(tmp_path, small)


def replaced(line: int, column: int, value: str) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        rows = [row.split("\t") for row in content.decode().splitlines()]
        rows[line - 1][column] = value
        return "".join("\t".join(row) + "\n" for row in rows).encode()

    return damage


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (replaced(3, 0, "0"), "wrong user id in line 3: expected 1 to 6, found 0"),
        (replaced(4, 0, "7"), "wrong user id in line 4: expected 1 to 6, found 7"),
        (replaced(20, 1, "0"), "wrong item id in line 20: expected 1 to 7, found 0"),
        (replaced(1, 1, "8"), "wrong item id in line 1: expected 1 to 7, found 8"),
        (replaced(2, 1, "-3"), "wrong item id in line 2: expected 1 to 7, found -3"),
        (replaced(5, 2, "0"), "wrong rating in line 5: expected 1 to 5, found 0"),
        (replaced(5, 2, "6"), "wrong rating in line 5: expected 1 to 5, found 6"),
        (replaced(6, 2, "3.5"), "wrong format in line 6"),
        (replaced(6, 0, "99999999999999999999"), "wrong format in line 6"),
        (lambda content: content[:-11], "wrong format in line 20"),
        (lambda content: content + b"1\t1\n", "wrong format in line 21"),
        (lambda content: b"\n".join(content.splitlines()[:19]), "expected 20, found 19"),
        (lambda content: content + b"1\t1\t1\t1\n", "expected 20, found 21"),
        (lambda content: b"", "expected 20, found 0"),
        (lambda content: content.replace(b"\t", b","), "wrong format in line 1"),
        (
            lambda content: b"".join(b"%d\t1\t1\n" % (i % 6 + 1) for i in range(20)),
            "found 3 in each line",
        ),
        (lambda content: WEB_PAGE, "a web page"),
        (
            lambda content: content[content.index(b"\n") + 1 :] + content.splitlines(True)[1],
            "expected every user-item pair once, found 1 repeated",
        ),
    ],
)
def test_a_bad_row_is_named_with_its_line(
    tmp_path: Path, small: SmallMovieLens, damage: Callable[[bytes], bytes], found: str
) -> None:
    small.contents["u1.base"] = damage(small.contents["u1.base"])
    small.write(tmp_path / "ml-100k")
    with pytest.raises(DataError) as caught:
        load(tmp_path, small)
    assert str(caught.value).startswith(str(tmp_path / "ml-100k" / "u1.base"))
    assert found in str(caught.value)


def test_a_bad_row_inside_the_archive_is_named(tmp_path: Path, small: SmallMovieLens) -> None:
    small.contents["u1.base"] = replaced(3, 0, "0")(small.contents["u1.base"])
    (tmp_path / "ml-100k.zip").write_bytes(small.archive)
    with pytest.raises(DataError, match=r"ml-100k\.zip:ml-100k/u1\.base: wrong user id in line 3"):
        load(tmp_path, small)


def test_parts_that_overlap_are_refused(tmp_path: Path, small: SmallMovieLens) -> None:
    base = small.contents["u1.base"].splitlines(True)
    test = small.contents["u1.test"].splitlines(True)
    small.contents["u1.test"] = b"".join([base[7], *test[1:]])
    small.write(tmp_path)
    with pytest.raises(DataError, match="expected disjoint parts, found 1 user-item pairs in both"):
        load(tmp_path, small)


def test_parts_that_are_not_the_whole_are_refused(tmp_path: Path, small: SmallMovieLens) -> None:
    assert small.table is not None
    changed = small.table.copy()
    changed[11, 2] = changed[11, 2] % 5 + 1
    small.contents["u.data"] = table_bytes(changed)
    small.write(tmp_path)
    with pytest.raises(DataError, match="found 1 that differ"):
        load(tmp_path, small)


@pytest.mark.parametrize("fold", [0, 6, -1])
def test_a_fold_that_does_not_exist_is_a_configuration_error(tmp_path: Path, fold: int) -> None:
    with pytest.raises(ConfigError, match=f"model.fold={fold}: expected one of 1, 2, 3, 4, 5"):
        load_movielens(fold, tmp_path)


def test_the_published_values() -> None:
    files = movielens.PUBLISHED
    assert (files.num_users, files.num_items, files.num_ratings) == (943, 1682, 100_000)
    assert files.num_test == 20_000
    assert all(address.startswith("https://") for address in movielens.ADDRESSES)


@needs_movielens
def test_the_published_folds() -> None:
    def codes(part: Ratings) -> NDArray[np.int64]:
        """One number for each (user, item, rating), in ascending order."""
        return np.sort((part.users.astype(np.int64) * 1_682 + part.items) * 6 + part.ratings)

    folds = [load_movielens(fold, REAL, addresses=()) for fold in range(1, 6)]
    assert all(len(fold.train.users) == 80_000 for fold in folds)
    assert all(len(fold.test.users) == 20_000 for fold in folds)
    complete = np.union1d(codes(folds[0].train), codes(folds[0].test))
    assert len(complete) == 100_000
    of_tests = np.sort(np.concatenate([codes(fold.test) for fold in folds]))
    np.testing.assert_array_equal(of_tests, complete, "the test parts partition the ratings")
    assert len(np.unique(folds[0].train.items)) == 1_650, "fold 1 trains on 1,650 of the items"
    # Every user rated at least 20 items (the data set's README).
    every_user = np.concatenate([folds[0].train.users, folds[0].test.users])
    assert np.bincount(every_user, minlength=943).min() >= 20
