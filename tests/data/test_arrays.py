"""A user's data files: what is read, and what is refused by row and column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mamba_cli.data import arrays
from mamba_cli.data.arrays import checked_rows, read_data
from mamba_cli.errors import ConfigError, DataError


def test_the_arrays_of_an_archive_have_their_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((3, 2)), y=np.arange(3))
    found = checked_rows(read_data(tmp_path / "d.npz"), "d.npz")
    assert {name: (a.shape, a.dtype.name) for name, a in found.items()} == {
        "x": ((3, 2), "float32"),
        "y": ((3,), "int32"),
    }


def test_a_bare_array_is_memory_mapped_and_fields_have_names(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(6.0).reshape(3, 2))
    bare = read_data(tmp_path / "a.npy")
    assert isinstance(bare, np.memmap)
    np.testing.assert_array_equal(checked_rows(bare, "a.npy"), np.arange(6).reshape(3, 2))
    np.save(tmp_path / "s.npy", np.array([(1.5, 2), (2.5, 3)], dtype=[("x", "f8"), ("k", "i4")]))
    fields = checked_rows(read_data(tmp_path / "s.npy"), "s.npy")
    np.testing.assert_array_equal(fields["x"], [1.5, 2.5])
    np.testing.assert_array_equal(fields["k"], [2, 3])


def test_the_columns_of_a_table_are_arrays_or_are_put_together(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("age,dose,ill\n40,1.5,True\n50,2.5,False\n")
    plain = read_data(path)
    assert list(plain) == ["age", "dose", "ill"]
    chosen = checked_rows(read_data(path, {"x": ["dose", "age"], "y": "ill"}), "d.csv")
    np.testing.assert_array_equal(chosen["x"], [[1.5, 40], [2.5, 50]])
    assert chosen["y"].tolist() == [True, False]


def test_parquet_is_a_table_or_says_what_it_needs(tmp_path: Path) -> None:
    table = pd.DataFrame({"x": [1.0, 2.0], "y": [0, 1]})
    path = tmp_path / "d.parquet"
    try:
        table.to_parquet(path)
    except ImportError:
        path.write_bytes(b"PAR1")
        with pytest.raises(ConfigError, match="needs pyarrow, which is not installed"):
            read_data(path)
        return
    np.testing.assert_array_equal(read_data(path, {"z": ["x", "y"]})["z"], [[1, 0], [2, 1]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,y\n1,2\n3,\n", r"column y, row 1 \(counted from 0\) is empty or NaN, 1 such"),
        ("x,y\n1,a\n3,b\n", r"column y holds text \(row 0: 'a'\)"),
        ("", r"cannot read .*d\.csv: No columns"),
    ],
)
def test_a_table_with_holes_or_text_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "d.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_data(tmp_path / "d.csv")


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("x,y\n1,2\n")
    with pytest.raises(ConfigError, match=r"model\.columns\.a='z': .* no such column. It has x, y"):
        read_data(tmp_path / "d.csv", {"a": ["x", "z"]})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": np.ones(3), "y": np.ones(2)}, "x has 3 rows and y has 2"),
        ({"x": np.ones((0, 3))}, r"it is empty \(no rows\)"),
        ({}, "there is no array in it"),
        ({"x": 3.0}, "x is a single number"),
        ({"x": np.array(["a", "b"])}, "x holds <U1 values"),
        ({"x": [[1, 2], [3]]}, "x is not an array"),
        ({"x": np.array([[1, 2], [3, np.inf]])}, r"x, row 1, column 1 \(counted from 0\) is inf"),
        ({"x": np.array([1.0, 1e39])}, r"x, row 1 \(counted from 0\) is 1e\+39; .* single prec"),
        ({"k": np.array([1, 2**40])}, r"k, row 1 \(counted from 0\) is 1099511627776"),
        ((np.ones(2), {"a": np.array([1, np.nan])}), r"1\.a, row 1 \(counted from 0\) is nan"),
        ({"t": 1.7e9 + np.arange(5.0)}, r"t \(counted .* lies between 1700000000 and .*: subtract"),
        ({"x": np.stack([np.arange(3.0), 1e8 + np.arange(3)], 1)}, r"x, column 1 .* rounds it by"),
        ({"x": pd.DataFrame({"a": [1.0, np.nan]})}, "column a, row 1"),
    ],
)
def test_what_no_chain_could_use_is_refused_by_place(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        checked_rows(data, "here")


@pytest.mark.parametrize(
    "column",
    [
        1.7e9 + 86_400 * np.arange(400.0),  # days: steps of 128 s do not matter
        np.full(4, 0.1),
        np.array([0.1 + 0.2, 0.3]),  # a constant, but for the last bit
        np.array([1e30, -1e30]),
        np.random.default_rng(0).normal(size=50),
    ],
)
def test_what_single_precision_tells_apart_is_taken(column: np.ndarray) -> None:
    np.testing.assert_allclose(checked_rows(column, "here"), column, rtol=1e-7)


def test_a_data_frame_is_its_columns_by_name() -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": [True, False]})
    found = checked_rows(frame, "here")
    assert list(found) == ["x", "y"]
    assert found["y"].tolist() == [True, False]
    assert checked_rows((frame, np.ones(2)), "here")[0]["x"].tolist() == [1.0, 2.0]


def test_the_memory_of_a_container_counts(tmp_path: Path) -> None:
    assert arrays._free_bytes_of_group(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert arrays._free_bytes_of_group(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert arrays._free_bytes_of_group(tmp_path) == 700
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 50\n")
    assert arrays._free_bytes_of_group(tmp_path) == 750


def test_a_bad_value_far_down_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "ROWS_PER_CHECK", 10)
    data = np.zeros((35, 2))
    data[33, 1] = np.nan
    with pytest.raises(DataError, match="row 33, column 1"):
        checked_rows(data, "here")


def test_data_that_do_not_fit_into_memory_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1000, 4)))
    monkeypatch.setattr(arrays, "_available_bytes", lambda: 4 * 4000 * 3 - 1)
    with pytest.raises(DataError, match=r"1,000 rows need about .* of memory"):
        checked_rows(read_data(tmp_path / "a.npy"), "a.npy")
    monkeypatch.setattr(arrays, "_available_bytes", lambda: 4 * 4000 * 3)
    assert checked_rows(read_data(tmp_path / "a.npy"), "a.npy").shape == (1000, 4)


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.csv"])
def test_a_file_that_is_missing_or_damaged_is_a_data_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"no such file; model\.data= names"):
        read_data(tmp_path / name)
    (tmp_path / name).write_bytes(b"\x00\xff\xfe broken")
    if name != "a.csv":
        with pytest.raises(DataError, match="cannot read"):
            read_data(tmp_path / name)


@pytest.mark.parametrize("compress", [False, True])
def test_an_archive_that_is_cut_short_or_altered_is_a_data_error(
    tmp_path: Path, compress: bool
) -> None:
    path = tmp_path / "a.npz"
    (np.savez_compressed if compress else np.savez)(path, x=np.arange(2000.0))
    whole = path.read_bytes()
    middle = len(whole) // 2
    for damaged in (whole[:-100], whole[:middle] + b"\xff" * 8 + whole[middle + 8 :]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"cannot read .*a\.npz"):
            read_data(path)


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.npz, \.npy, \.csv, \.parquet"):
        read_data(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match=r"model\.columns=.* is not allowed with a\.npz"):
        read_data(tmp_path / "a.npz", {"x": "a"})
