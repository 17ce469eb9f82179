"""Whitening by the Laplace approximation."""

from __future__ import annotations

import numpy as np
import pytest

from mamba_cli.errors import NothingUsableError
from mamba_cli.ground_truth.coordinates import laplace_matrix


def test_an_indefinite_hessian_cannot_whiten() -> None:
    with pytest.raises(NothingUsableError, match=r"smallest eigenvalue -1\b.*whiten=false"):
        laplace_matrix(np.diag([2.0, -1.0]))
