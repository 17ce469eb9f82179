from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from small_files import WEB_PAGE, idx_bytes

from mamba_cli.data.idx import IdxFile
from mamba_cli.data.notmnist import has_letters, load_letters
from mamba_cli.errors import DataError

REAL = Path(os.environ.get("MAMBA_DATA_DIR", Path(__file__).parents[3] / "shared" / "data"))
SMALL = IdxFile("letters", (4, 2, 3), None)


def test_letters_are_looked_for_beside_no_digits(tmp_path: Path) -> None:
    images = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    (tmp_path / "letters.gz").write_bytes(gzip.compress(idx_bytes(images)))
    assert not has_letters(tmp_path, file=SMALL)
    (tmp_path / "notmnist").mkdir()
    (tmp_path / "letters.gz").rename(tmp_path / "notmnist" / "letters.gz")
    assert has_letters(tmp_path, file=SMALL)
    np.testing.assert_array_equal(load_letters(tmp_path, file=SMALL), images.reshape(4, 6))


def test_missing_letters_say_where_they_belong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="by hand") as caught:
        load_letters(tmp_path)
    assert str(tmp_path / "notmnist") in str(caught.value)
    assert "t10k-images-idx3-ubyte.gz" in str(caught.value)


def test_a_web_page_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notmnist").mkdir()
    (tmp_path / "notmnist" / "letters.gz").write_bytes(WEB_PAGE)
    with pytest.raises(DataError, match="a web page"):
        load_letters(tmp_path, file=SMALL)


@pytest.mark.skipif(
    not has_letters(REAL), reason=f"notMNIST is not in {REAL / 'notmnist'} (set MAMBA_DATA_DIR)"
)
def test_the_letters() -> None:
    letters = load_letters(REAL)
    assert letters.shape == (10_000, 784)
    assert letters.min() == 0
    assert letters.max() == 255
