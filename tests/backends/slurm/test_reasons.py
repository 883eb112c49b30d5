"""Why a job waits in Slurm, and which limits a plan knows from doctor; from recorded answers of Slurm 22.05.8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.backends.slurm import partitions, reasons
from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.backends.slurm.client import QueueEntry
from cloudtrain.backends.slurm.status import attempt_status, end_of, merge_nodes
from cloudtrain.events import REASON_CHARS, State
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle

SINFO = (
    "main*|infinite|1-infinite|gpu:a100:4(S:0-1)\nmain*|infinite|1-infinite|gpu:a100:8(S:0-1),nvme:2\n"
    "short|12:00:00|1-2|(null)\nweek|7-00:00:00|1|gpu:2\nnight|30:00|4-16|\nbrief|9:00|1-4|gpu:a30:1,gpu:a10:2\n"
)
NEVER, SOON = "it will not start by itself: ", "it starts by itself"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", SOON),
        ("Priority", SOON),
        ("PartitionTimeLimit", NEVER + "it requests more time than its partition allows: lower limits.max_runtime"),
        ("PartitionNodeLimit", NEVER + "it requests more or fewer nodes than its partition allows: change num_nodes"),
        ("ReqNodeNotAvail, UnavailableNodes:node-[2-3]", "reserved for maintenance"),
        ("AssocGrpGRES", "the account's limit is reached; it starts when other jobs end"),
        ("AssocGrpCPUMinutesLimit", "computing time is used up"),
        ("QOSMaxGRESPerUser", "the limit of the quality of service is reached; it starts when other jobs end"),
        ("QOSMaxWallDurationPerJobLimit", NEVER + "the job requests more than one job may have"),
        ("AssocMaxCpuPerJobLimit", NEVER + "the job requests more than one job may have"),
        ("JobHeldAdmin", NEVER + "an administrator put it on hold"),
        ("DependencyNeverSatisfied", NEVER),
    ],
)
def test_a_job_that_waits_has_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, words: str):
    folder = tmp_path / "runs" / "r" / "a1"
    folder.mkdir(parents=True)
    (folder / "job").write_text("7")
    backend = SlurmBackend({"folder": str(tmp_path)}, tmp_path)
    answer = {"code": 0, "out": f"7|PENDING|{reason}\n", "err": ""}
    monkeypatch.setattr(backend, "_run", lambda argv: answer)
    for status in (backend.status(str(folder)), backend.statuses([str(folder)])[str(folder)]):
        assert status.state is State.QUEUED and status.reason.startswith(f"Slurm: {reason}: ")
        assert words in status.reason and len(status.reason) < REASON_CHARS
        assert ("to give up, run `cloudtrain cancel`" in status.reason) == (NEVER in status.reason)


def test_a_reason_that_is_not_known_stays_as_it_is():
    assert reasons.describe("FrontEndDown") == "Slurm: FrontEndDown" and reasons.describe("") == ""


def test_limits_of_partitions():
    assert partitions.parse(SINFO) == {
        "main": {"seconds": None, "nodes": None, "gpus": 8, "default": True},
        "short": {"seconds": 12 * 3600, "nodes": 2, "gpus": 0, "default": False},
        "week": {"seconds": 7 * 86400, "nodes": 1, "gpus": 2, "default": False},
        "night": {"seconds": 1800, "nodes": 16, "gpus": 0, "default": False},
        "brief": {"seconds": 540, "nodes": 4, "gpus": 3, "default": False},
    }


def test_a_plan_compares_a_job_with_what_doctor_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.py").write_text("print(1)\n")
    bundle = Bundle.make(tmp_path, tmp_path.parent / f"{tmp_path.name}-bundles")

    def notes(partition: str | None = None, **job: object) -> list[str]:
        given = {"folder": "/s"} | ({"partition": partition} if partition else {})
        backend = SlurmBackend(given, tmp_path / "home" / "runs")
        monkeypatch.setattr(backend, "_run", lambda argv: pytest.fail("a plan asks nobody"))
        made = Job.from_dict({"name": "x", "source": str(tmp_path), "entrypoint": "train.py", **job})
        return [text for text in backend.plan(made, bundle, "x-run").notes if "doctor" in text]

    assert notes("short") == [], "doctor has not looked"
    monkeypatch.setattr(partitions, "now", lambda: "2026-11-23T12:00:00.000000Z")
    partitions.store(
        tmp_path / "home" / "runs", SlurmBackend({"folder": "/s"}, tmp_path).group, partitions.parse(SINFO)
    )
    assert notes() == notes("week") == notes("main", num_nodes=99) == []
    assert notes("short", num_nodes=3) == [
        "partition short allows 12h (doctor, 2026-11-23): limits.max_runtime of 24h runs in 3 slices of at most 11h 55m, "
        "with a wait in the queue before each",
        "partition short gives a job at most 2 nodes (seen by doctor on 2026-11-23), not 3: it would never start",
    ]
    assert notes("short", limits={"max_runtime": "715m"}) == []
    eight, nine = {"accelerators": "A100:8"}, {"accelerators": "A100:9"}
    assert notes(resources=eight) == []
    never = (
        "no node of partition main has more than 8 GPUs (seen by doctor on 2026-11-23), and the job asks for 9 on one"
    )
    assert notes(resources=nine) == [f"{never}: it would never start"]
    server = {"run": "serve", "resources": {"accelerators": "A100:2"}, "colocate": "trainer"}
    together = {"trainer": {"resources": {"accelerators": "A100:7"}}, "server": server}
    assert notes(roles=together) == [f"{never}: it would never start"], "the GPUs of both"
    assert notes("brief") == [
        "partition brief allows 9m (seen by doctor on 2026-11-23) and the job asks for 24h 05m: it would never start; "
        "lower limits.max_runtime to 4m"
    ], "too short for slices"
    partitions.store(tmp_path / "home" / "runs", SlurmBackend({"folder": "/s"}, tmp_path).group, {
        "tiny": {"seconds": 300, "nodes": None, "default": True}
    })  # fmt: skip
    assert notes() == [
        "partition tiny allows 5m (seen by doctor on 2026-11-23) and the job asks for 24h 05m: it would never start; "
        "choose another options.slurm.partition: beside limits.max_runtime a job needs 5m"
    ]
    partitions.store(
        tmp_path / "home" / "runs", SlurmBackend({"folder": "/s"}, tmp_path).group, partitions.parse(SINFO)
    )
    assert notes("shrot") == ["doctor found no partition shrot on 2026-11-23, but brief, main, night, short, week"]


@pytest.mark.parametrize("reported", [True, False])
def test_a_job_that_the_cgroup_has_killed_says_so(reported: bool):
    """Slurm knows that the memory was the reason, the launcher knows which rank it was."""
    node = {
        "state": "FAILED",
        "exit_code": 1,
        "reason": "rank 3 was killed (SIGKILL)",
        "ended_at": "2026-11-23T12:00:00Z",
    }
    files = {"node-0/status.json": json.dumps(node)} if reported else {"state": "STARTED 2026-11-23"}
    status = attempt_status(files, QueueEntry("7", "OUT_OF_MEMORY", "OutOfMemory"), merge_nodes(files), str)
    assert (status.state, status.exit_code) == (State.FAILED, 137)
    assert status.reason.endswith("the job used more memory than it requested (resources.memory)")
    assert ("rank 3 was killed" in status.reason) is reported


@pytest.mark.parametrize(
    ("script", "nodes", "end"),
    [
        ("STARTED 0 - 2", ["SUCCEEDED", "SUCCEEDED"], State.SUCCEEDED),
        ("STARTED 0 - 2", ["FAILED", "CANCELLED"], State.CANCELLED),
        ("STARTED 0 - 2", ["FAILED", "PREEMPTED"], None),  # the script is about to requeue the job
        ("STARTED 0 - 2", ["SUCCEEDED"], None),  # the other one has not begun, or its file was just moved away
        ("STARTED 0 - 2", ["FAILED", "RUNNING"], None),
        ("STARTED 0 - 2", ["PREEMPTED", "PREEMPTED"], None),  # the script is about to requeue the job
        ("STARTED 0 - 2", ["LOST", "RUNNING"], State.LOST),  # for the client to go on from
        ("REQUEUED 0 75 again", ["SUCCEEDED"], None),  # node 0 was preempted, and its file is moved away first
        ("REQUEUED 0 75 again", ["FAILED"], None),
        ("REQUEUED 0 75 again", ["LOST", "FAILED"], None),
        ("", ["SUCCEEDED"], None),  # of how many nodes is not known
        ("ENDED 0 0 RUNNING", ["SUCCEEDED", "SUCCEEDED"], State.SUCCEEDED),
    ],
)
def test_an_end_is_taken_from_files_only_where_slurm_cannot_change_it(script: str, nodes: list[str], end: State | None):
    files = {f"node-{2 - len(nodes) + at}/status.json": json.dumps({"state": state}) for at, state in enumerate(nodes)}
    found = end_of({"job": "7", "state": script, **files} if script else files)
    assert (found.state if found else None) is end
