"""Calls that are the tasks of one array: one sbatch, whatever is lost on the way, and a job each where there is no array."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.errors import Unreachable
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle

REFUSED = "sbatch: error: Batch job submission failed: Invalid job array specification"
SILENT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


class Cluster:
    """Slurm's commands, as far as the backend calls them here: sbatch, and squeue by a name."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.error, self.starts = "", True  # what the next sbatch answers, and whether it starts its job all the same

    def run(self, argv: list[str]) -> dict[str, object]:
        options = dict(text.partition("=")[::2] for text in argv)
        if argv[0] == "sbatch":
            error, self.error = self.error, ""
            if self.starts or not error:
                self.sent.append(argv)
            return {"code": int(bool(error)), "out": "" if error else f"{len(self.sent)}\n", "err": error}
        name = options.get("--name", "")
        tasks = "_[0-9]" if "-and-" in name else ""
        found = [f"{n}{tasks}|PENDING|None" for n, each in enumerate(self.sent, 1) if f"--job-name={name}" in each]
        return {"code": 1 if argv[0] in ("sacct", "readlink") else 0, "out": "\n".join(found), "err": ""}

    def client(self, folder: Path) -> SlurmBackend:
        backend = SlurmBackend({"folder": str(folder / "shared")}, folder / "runs")
        backend.__dict__["_run"] = self.run
        return backend


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text("print(1)\n")
    return Bundle.make(tmp_path / "source", tmp_path / "bundles", trainer=False)


def plans_of(backend: SlurmBackend, bundle: Bundle, **job: object) -> list[Plan]:
    data = {"name": "call", "entrypoint": "train.py", "environment": {"requirements": "none"}, **job}
    return [backend.plan(Job.from_dict({**data, "args": [str(n)]}), bundle, f"call-{n}") for n in range(3)]


def numbers(plans: list[Plan]) -> list[str]:
    return [Path(plan.request["folder"], "job").read_text() for plan in plans]


def test_the_first_submit_sends_all_calls(cluster: Cluster, bundle: Bundle, tmp_path: Path):
    backend = cluster.client(tmp_path)
    plans = plans_of(backend, bundle)
    assert backend.most_together(plans[0]) == 1000
    backend.expect(plans, 2)
    assert [backend.submit(plan, bundle) for plan in plans] == [plan.request["folder"] for plan in plans]
    [argv] = cluster.sent
    assert "--array=0-2%2" in argv and numbers(plans) == ["1_0", "1_1", "1_2"]
    usual = [text for text in plans[1].request["sbatch"][:-1] if plans[1].run_id not in text]
    assert set(usual) < set(argv), "what Slurm is asked for is the same"
    script = Path(argv[-1]).read_text()
    assert [script.count(str(plan.request["folder"])) for plan in plans] == [1, 1, 1]


def test_a_lost_answer_makes_no_second_array(cluster: Cluster, bundle: Bundle, tmp_path: Path):
    backend = cluster.client(tmp_path)
    plans = plans_of(backend, bundle)
    backend.expect(plans, 2)
    cluster.error = SILENT
    with pytest.raises(Unreachable):
        backend.submit(plans[0], bundle)
    again = cluster.client(tmp_path)  # of the process that continues
    again.expect(plans, 2)
    assert again.submit(plans[1], bundle) and again.submit(plans[0], bundle) and again.submit(plans[2], bundle)
    assert len(cluster.sent) == 1 and numbers(plans) == ["1_0", "1_1", "1_2"]


def test_what_slurm_never_got_is_sent_again(cluster: Cluster, bundle: Bundle, tmp_path: Path):
    backend = cluster.client(tmp_path)
    plans = plans_of(backend, bundle)
    backend.expect(plans, 2)
    cluster.error, cluster.starts = SILENT, False
    with pytest.raises(Unreachable):
        backend.submit(plans[0], bundle)
    again = cluster.client(tmp_path)
    again.expect(plans, 2)
    assert all(again.submit(plan, bundle) for plan in plans)
    assert len(cluster.sent) == 1 and numbers(plans) == ["1_0", "1_1", "1_2"]


def test_a_call_that_leaves_its_array_is_found_as_a_job_of_its_own(cluster: Cluster, bundle: Bundle, tmp_path: Path):
    backend = cluster.client(tmp_path)
    plans = plans_of(backend, bundle)
    backend.expect(plans, 2)
    cluster.error, cluster.starts = SILENT, False
    with pytest.raises(Unreachable):
        backend.submit(plans[0], bundle)
    cluster.error, cluster.starts = SILENT, True
    again = cluster.client(tmp_path)
    with pytest.raises(Unreachable):
        again.submit(plans[0], bundle)
    assert again.submit(plans[0], bundle) and len(cluster.sent) == 1 and numbers(plans[:1]) == ["1"]


def test_a_cluster_without_arrays_gets_a_job_for_each_call(cluster: Cluster, bundle: Bundle, tmp_path: Path):
    backend = cluster.client(tmp_path)
    plans = plans_of(backend, bundle)
    backend.expect(plans, 2)
    cluster.error, cluster.starts = REFUSED, False
    assert all(backend.submit(plan, bundle) for plan in plans)
    assert not any("--array" in text for argv in cluster.sent for text in argv)
    assert numbers(plans) == ["1", "2", "3"]


def test_another_job_is_not_sent_with_them(cluster: Cluster, bundle: Bundle, tmp_path: Path):
    backend = cluster.client(tmp_path)
    *plans, other = plans_of(backend, bundle)
    backend.expect(plans, 2)
    backend.submit(other, bundle)
    assert numbers([other]) == ["1"]


def test_a_job_that_slurm_requeues_is_in_no_array(cluster: Cluster, bundle: Bundle, tmp_path: Path):
    backend = cluster.client(tmp_path)
    plan = plans_of(backend, bundle, retry={"max_attempts": 3})[0]
    assert "--requeue" in plan.request["sbatch"] and backend.most_together(plan) == 1
