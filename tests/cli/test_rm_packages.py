"""`rm --packages`: what it lists, keeps and deletes; a deleted package is made again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.history.trials import SweepHistory
from cloudtrain.job.job import Job
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter

BOUND_S = 240.0
WAITS = "import pathlib, time\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.1)\n"


def submit(folder: Path, script: str) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    job = {"name": "pack", "entrypoint": "train.py", "source": str(folder), "environment": {"requirements": "none"}}
    return Submitter("local").submit(Job.from_dict(job))


def digest(run: Run) -> str:
    return str(run.attempts[0].plan.bundle["sha256"])


def make_idle(home: Path, hours: float) -> None:
    for path in (home / "bundles").iterdir():
        if path.is_file():
            os.utime(path, (time.time() - hours * 3600,) * 2)


def archives(home: Path) -> set[str]:
    return {path.name.removesuffix(".tar.gz") for path in (home / "bundles").glob("*.tar.gz")}


@pytest.fixture
def two(tmp_path: Path, home: Path):
    """Return a run that has ended and one that has not, of different sources."""
    ended = submit(tmp_path / "a", "print('done')\n")
    assert ended.wait(BOUND_S).state is State.SUCCEEDED
    live = submit(tmp_path / "b", WAITS)
    yield ended, live
    live.cancel(BOUND_S)


def test_what_no_live_run_needs_is_listed_and_deleted(two, tmp_path, home, cli):
    ended, live = two
    *listed, total = cli("rm", "--packages", "--dry-run").out.splitlines()
    assert total.startswith("0 packages, 0 B; kept: 2 packages, ") and total.endswith("faster")
    reasons = {row.split()[2]: row.partition("(kept: ")[2] for row in listed}
    assert reasons == {digest(ended)[:12]: "used within the last hour; --force deletes it)",
                       digest(live)[:12]: "used by a run or sweep that has not ended)"}  # fmt: skip
    assert "used within the last hour" in cli("rm", "--packages", "--older", "1s", "--dry-run").out
    assert cli("rm", "--packages", "--force", "--dry-run").out.splitlines()[-1].startswith("1 package, ")
    make_idle(home, 2)
    shown = cli("rm", "--packages", "--dry-run")
    assert shown.out.splitlines()[0].endswith(f"{digest(ended)[:12]}  {tmp_path / 'a'}  used 2h ago")
    assert f"{digest(live)[:12]}  {tmp_path / 'b'}  used 2h ago  (kept: used by a run" in shown.out
    assert (
        "\n1 package, " in shown.out
        and "; kept: 1 package, " in shown.out
        and archives(home) == {digest(ended), digest(live)}
    )
    refused = cli("rm", "--packages")
    assert (
        refused.code == 2 and "nothing was deleted" in refused.err and archives(home) == {digest(ended), digest(live)}
    )
    deleted = cli("rm", "--packages", "--yes", "--json")
    (row,) = [json.loads(line) for line in deleted.out.splitlines()]
    assert row["sha256"] == digest(ended) and row["deleted"] and row["source"].endswith("/a")
    assert archives(home) == {digest(live)}
    assert not [path for path in (home / "bundles").iterdir() if path.name.startswith(digest(ended))]


def test_a_deleted_package_is_made_again_and_an_old_run_says_what_is_missing(two, tmp_path, home, cli):
    ended, _ = two
    make_idle(home, 2)
    assert cli("rm", "--packages", "--yes").code == 0
    refused = cli("rerun", ended.run_id)
    assert refused.code != 0 and "--source" in refused.err
    again = submit(tmp_path / "a", "print('done')\n")
    assert again.wait(BOUND_S).state is State.SUCCEEDED and digest(again) == digest(ended)


def test_a_submit_and_a_sweep_keep_their_package(two, tmp_path, home, cli):
    ended, _ = two
    make_idle(home, 48)
    assert submit(tmp_path / "a", "print('done')\n").wait(BOUND_S).state is State.SUCCEEDED
    used = cli("rm", "--packages", "--older", "1d", "--dry-run").out
    assert "0 packages" in used and "(kept: used within the last hour;" in used
    make_idle(home, 5)
    assert "(kept: used within the time of --older)" in cli("rm", "--packages", "--older", "1d", "--dry-run").out
    make_idle(home, 48)
    assert "1 package," in cli("rm", "--packages", "--older", "1d", "--dry-run").out
    SweepHistory(home).add("sweep-1", "s", {"bundle": digest(ended)})
    assert "0 packages" in cli("rm", "--packages", "--dry-run").out


def test_what_to_delete_must_be_said(home, cli):
    assert cli("rm", "--ended").code == 2
    assert cli("rm", "--packages", "--here").code == 2
    assert cli("rm", "--packages", "--older", "soon").code == 2
    assert cli("rm", "--packages", "--dry-run").out == "0 packages, 0 B\n"
