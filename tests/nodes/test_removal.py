"""What is measured and deleted of a run's folder, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.nodes.removal import measure, remove_run


def test_a_runs_folder_is_measured_and_deleted_alone(tmp_path: Path):
    for name in ("a-run", "another"):
        (tmp_path / name / "a1").mkdir(parents=True)
        (tmp_path / name / "a1" / "log").write_bytes(b"12345")
    (tmp_path / "a-run" / "link").symlink_to(tmp_path / "another")
    assert measure(tmp_path / "another") == 5 and measure(tmp_path / "none") is None
    for _ in range(2):
        remove_run(tmp_path, "a-run")
    assert not (tmp_path / "a-run").exists() and measure(tmp_path / "another") == 5


@pytest.mark.parametrize("run", ["", ".", "..", "../a", "a/b", "/a", ".git"])
def test_what_is_no_runs_name_is_refused(tmp_path: Path, run: str):
    with pytest.raises(ValueError, match="is not a run"):
        remove_run(tmp_path, run)
