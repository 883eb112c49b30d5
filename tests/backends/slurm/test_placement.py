"""Where Slurm puts a job: account, quality of service, reservation, and partitions of which one refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.runs.submit import Submitter
from tests.conftest import WAIT_S, wait_for
from tests.lab.slurm import Slurm

TARGETS = """\
[targets.fast]
backend = "slurm"
folder = "{folder}"
python = "{python}"
partition = "high"

[targets.slow]
backend = "slurm"
folder = "{folder}"
python = "{python}"
partition = "main"
account = "nlp"
qos = "long"
reservation = "course"
"""


@pytest.mark.usefixtures("census")
def test_the_next_partition_takes_the_job_where_it_may_run(
    slurm: Slurm, tmp_path: Path, home: Path, monkeypatch
) -> None:
    """Two targets on one cluster: the first partition is drained, the second one's reservation and account hold.

    Without slurmdbd slurmctld records an account, and takes any quality of service without a word: that is in the plan.
    """
    (tmp_path / "cloudtrain.toml").write_text(TARGETS.format(folder=slurm.shared, python=sys.executable))
    (tmp_path / "train.py").write_text("print('trained', flush=True)\n")
    monkeypatch.chdir(tmp_path)
    job = {"source": ".", "entrypoint": "train.py", "target": ["fast", "slow"], "prefer": "order"}
    nodes = ",".join(host.name for host in slurm.nodes)
    slurm.ask("scontrol", "create", "reservation", "reservationname=course", "starttime=now", "duration=60", "users=root",
              f"nodes={nodes}")  # fmt: skip
    slurm.ask("scontrol", "update", "partitionname=high", "state=DRAIN")
    try:
        run = Submitter(home=home, watch=False).submit(job)
        assert run.wait(WAIT_S).state is State.SUCCEEDED, run.record.status
        job_number = Path(str(run.attempts[-1].handle), "job").read_text()
        recorded = slurm.ask("scontrol", "-o", "show", "job", job_number)
    finally:
        slurm.ask("scontrol", "update", "partitionname=high", "state=UP")
        slurm.ask("scancel", "--user=root")
        wait_for(lambda: not slurm.ask("squeue", "-h"), "the end of its jobs")
        slurm.ask("scontrol", "delete", "reservationname=course")  # until then its nodes are reserved, not idle
        slurm.ready()
    assert [attempt.plan.target for attempt in run.attempts] == ["fast", "slow"]
    first, second = run.attempts
    assert first.status.event == "capacity" and "partition not available" in first.status.reason
    assert {"--account=nlp", "--qos=long", "--reservation=course"} <= set(second.plan.request["sbatch"])
    assert re.search(r" Account=nlp .* Partition=main .* Reservation=course ", recorded), recorded
