"""A max_runtime in slices: what a plan says; and the batch script with a clock, a srun and a scontrol of the test."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.backends.slurm import partitions, reasons
from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.backends.slurm.client import QueueEntry
from cloudtrain.backends.slurm.status import attempt_status
from cloudtrain.events import PLATFORM, State
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle
from tests.conftest import wait_for

HOUR = 3600
TOOLS = {
    "date": 'cat "$STAGE/clock"',
    # One start of the ranks: it ends as next-state says, or at the end of its slice.
    "srun": """
read -r slice_end slice_state <<<"$CLOUDTRAIN_SLICE"
echo "$(cat "$STAGE/clock") $CLOUDTRAIN_SLICE" >>"$STAGE/starts"
read -r state seconds <"$STAGE/next" 2>/dev/null || { state=$slice_state; seconds=$((slice_end - $(cat "$STAGE/clock") + 20)); }
: >"$STAGE/next"
echo $(($(cat "$STAGE/clock") + seconds)) >"$STAGE/clock"
printf '{"state": "%s"}' "$state" >../node-0/status.json
[ "$state" = SUCCEEDED ] || exit 75
""",
    "scontrol": """
case $1 in
show) echo "JobId=7 JobState=RUNNING Reason=None" ;;
requeue) [ ! -e "$STAGE/deny" ] || exit 1; cp state "$STAGE/requeued"; kill -9 $PPID ;;
esac
""",
}


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Plan]:
    def planned(options: dict | None = None, **job: object) -> Plan:
        source = tmp_path / "source"
        source.mkdir(exist_ok=True)
        (source / "train.py").write_text("print(1)\n")
        given = {"folder": str(tmp_path / "shared"), "partition": "short", **(options or {})}
        SlurmBackend.options().model_validate(given)
        backend = SlurmBackend(given, tmp_path / "runs")
        partitions.store(tmp_path / "runs", backend.group, partitions.parse("short|12:00:00|1-4\nlong|infinite|1-4\n"))
        made = Job.from_dict({"name": "s", "source": str(source), "entrypoint": "train.py", **job})
        return backend.plan(made, Bundle.make(source, tmp_path / "bundles"), "s-run")

    return planned


def test_a_plan_says_how_many_slices(planned: Callable[..., Plan]) -> None:
    plan = planned(limits={"max_runtime": "3d"})
    assert {"--time=720", "--requeue"} <= set(plan.request["sbatch"]) and plan.request["starts"] == 7
    assert any("runs in 7 slices of at most 11h 55m" in note and "(doctor, " in note for note in plan.notes)
    assert any("SIGTERM and have 30s (limits.grace)" in note for note in plan.notes)
    backend = SlurmBackend({"folder": "/s"}, Path("/nowhere"))
    assert backend.time_limit(plan).seconds == 7 * (12 * HOUR + 30), "which a cap is compared with"
    assert planned(limits={"max_runtime": "3d", "grace": "20m"}).request["starts"] == 7
    assert "--time=720" in planned(limits={"max_runtime": "3d", "grace": "20m"}).request["sbatch"]
    short = planned(limits={"max_runtime": "11h"})
    assert "--time=665" in short.request["sbatch"] and "starts" not in short.request
    assert "CLOUDTRAIN_SLICE" not in short.request["script"]
    assert "starts" not in planned({"partition": "long"}, limits={"max_runtime": "3d"}).request
    given = planned({"partition": "long", "slice": "24h"}, limits={"max_runtime": "3d"})
    assert given.request["starts"] == 3 and "--time=1445" in given.request["sbatch"]
    assert any(note.startswith("one slice is 24h (options.slurm.slice): ") for note in given.notes)


class Stage:
    """Runs a plan's batch script as Slurm would, start after start, until it does not ask for another."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.folder, self.stage, self.count = Path(str(plan.request["folder"])), folder / "stage", 0
        (self.folder / "source").mkdir(parents=True)
        (self.folder / "slurm.out").touch()
        script = self.folder / "job.sh"
        script.write_text(str(plan.request["script"]).replace("#!/bin/bash -l", "#!/bin/bash"))
        script.chmod(0o700)
        self.stage.mkdir()
        for name, text in TOOLS.items():
            (self.stage / name).write_text(f"#!/bin/bash\n{text}")
            (self.stage / name).chmod(0o755)
        (self.stage / "clock").write_text("1000000\n")

    def start(self, begins: str = "") -> str:
        """Run one start, whose ranks end as `begins` says ("STATE SECONDS"); return the script's last state."""
        (self.stage / "next").write_text(f"{begins}\n" if begins else "")
        environ = {**os.environ, "PATH": f"{self.stage}:{os.environ['PATH']}", "STAGE": str(self.stage)}
        environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_RESTART_COUNT": str(self.count)}
        with (self.folder / "slurm.out").open("ab") as out:  # as sbatch --open-mode=append
            subprocess.run([self.folder / "job.sh"], env=environ, stdout=out, stderr=out, check=False)
        self.count += 1
        (self.stage / "clock").write_text(f"{int((self.stage / 'clock').read_text()) + 5 * HOUR}\n")  # in the queue
        return (self.folder / "state").read_text().rstrip("\n")

    @property
    def lengths(self) -> list[tuple[int, str]]:
        """Return for each start how long it may train, and what its end is."""
        rows = [line.split() for line in (self.stage / "starts").read_text().splitlines()]
        return [(int(end) - int(at), state) for at, end, state in rows]


def test_slices_follow_until_max_runtime_is_used(planned: Callable[..., Plan], tmp_path: Path) -> None:
    stage = Stage(planned(limits={"max_runtime": "24h"}), tmp_path)
    assert stage.start() == "REQUEUED 0 75 slice-2-of-3"
    assert stage.start() == "REQUEUED 1 75 slice-3-of-3"
    assert stage.start() == "ENDED 2 75 RUNNING"
    first = 12 * HOUR - 300
    assert stage.lengths == [(first, "PREEMPTED")] * 2 + [(24 * HOUR - 2 * (first + 20), "TIMED_OUT")]
    files = {"job": "7", "state": "REQUEUED 0 75 slice-2-of-3"}
    status = attempt_status(files, QueueEntry("7", "PENDING", "BeginTime"), None, str)
    assert (status.state, status.reason) == (State.QUEUED, f"slice 2 of 3 waits. {reasons.describe('BeginTime')}")


def test_a_run_that_is_done_asks_for_no_more(planned: Callable[..., Plan], tmp_path: Path) -> None:
    stage = Stage(planned(limits={"max_runtime": "24h"}), tmp_path)
    assert stage.start().startswith("REQUEUED")
    assert stage.start(begins="SUCCEEDED 60") == "ENDED 1 0 RUNNING"
    assert json.loads((stage.folder / "node-0" / "status.json").read_text()) == {"state": "SUCCEEDED"}


def test_preemptions_are_counted_beside_slices(planned: Callable[..., Plan], tmp_path: Path) -> None:
    stage = Stage(planned(limits={"max_runtime": "24h"}, retry={"max_attempts": 2}), tmp_path)
    assert stage.start() == "REQUEUED 0 75 slice-2-of-3"
    assert stage.start(begins=f"PREEMPTED {HOUR}") == "REQUEUED 1 75 again"
    assert stage.start(begins=f"LOST {HOUR}") == "ENDED 2 75 RUNNING", "one restart was allowed"
    first = 12 * HOUR - 300
    assert [state for _, state in stage.lengths] == ["PREEMPTED", "PREEMPTED", "TIMED_OUT"]
    assert (stage.folder / "slices").read_text() == f"1 {first + 20 + 2 * HOUR}\n"
    assert stage.start() == "ENDED 3 75 restarts", "Slurm started it by itself"


def test_what_setup_lines_and_srun_print_is_in_the_log(planned: Callable[..., Plan], tmp_path: Path) -> None:
    plan = planned({"setup": ["echo '  loading  cuda\\t'; export SEEN=1"]}, limits={"max_runtime": "24h"})
    stage, backend = Stage(plan, tmp_path), SlurmBackend({"folder": str(tmp_path / "shared")}, tmp_path)
    srun = stage.stage / "srun"
    noise = "srun: error: node-2: task 0: Exited with exit code 75"
    srun.write_text(srun.read_text().replace("#!/bin/bash", f"#!/bin/bash\necho seen=$SEEN; echo '{noise}' >&2"))
    (stage.folder / "nodes").write_text("1")
    for starts in (1, 2):
        stage.start()
        wait_for(lambda: len(list(backend.logs(str(stage.folder)))) >= 2 * starts, "the lines")  # noqa: B023
        lines = list(backend.logs(str(stage.folder)))
        assert [line.text for line in lines] == ["  loading  cuda\\t", "seen=1"] * starts
        assert [line.seq for line in lines] == list(range(2 * starts))
        assert {(line.node, line.rank) for line in lines} == {(PLATFORM, -1)}
        assert list(backend.logs(str(stage.folder), after=lines[0].cursor)) == lines[1:]


@pytest.mark.parametrize("mark", ["cancel", "stop", "deny"])
def test_no_slice_follows_a_cancel(planned: Callable[..., Plan], tmp_path: Path, mark: str) -> None:
    stage = Stage(planned(limits={"max_runtime": "24h"}), tmp_path)
    srun = stage.stage / "srun"
    srun.write_text(srun.read_text().replace("exit 75", f"{{ touch ../{mark} $STAGE/{mark}; exit 75; }}"))
    assert stage.start() == "ENDED 0 75 RUNNING"
    assert not (stage.stage / "requeued").exists()
