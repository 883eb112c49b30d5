"""`cloudtrain forward` into a job of a real Slurm, whose nodes have a loopback address of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.forwarded import check_forward
from tests.backends.slurm.test_evaluation import configure
from tests.lab.slurm import Slurm

pytestmark = pytest.mark.usefixtures("census")


def test_a_server_in_a_rank_is_reached(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(slurm, tmp_path, monkeypatch)
    check_forward(tmp_path, "cluster")
