"""What is left of a cap, as docs/cost.md has it."""

from __future__ import annotations

from pathlib import Path

from cloudtrain.cli import main
from cloudtrain.events import State
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.conftest import clock, job, memory, source, submitter  # noqa: F401
from tests.runs.steps import newest, watch

PAGE = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()


def test_show_prints_what_is_left_of_the_cap(memory, submitter, job, capsys):  # noqa: F811
    limits = {"max_runtime": "3h", "grace": "10s", "max_cost": "40 USD"}
    run = submitter.submit(job.replace(limits=limits, num_nodes=2, resources={"usd_per_hour": 6.0}))
    MemoryBackend.finish(newest(run), State.TIMED_OUT, billable_s=2 * 3500)
    watch(run)
    assert main(["show", run.run_id]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["cap"])
    assert " ".join(line.split()) in [" ".join(each.split()) for each in PAGE.splitlines()]
