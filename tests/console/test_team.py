"""Runs of a whole team, attached from the place where their jobs write: the list, a run, a comparison; nothing to cancel."""

from __future__ import annotations

import getpass

import pytest
from playwright.sync_api import expect

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.attach import attach_all
from cloudtrain.runs.planning.plan import label
from cloudtrain.runs.submit import Submitter
from tests.conftest import wait_for

SCRIPT = """
import os, sys, time

for step in range(5):
    print('::cloudtrain::{"kind": "metric", "step": %d, "loss": %s}' % (step, float(sys.argv[1]) / (step + 1)), flush=True)
print("trained", flush=True)
out = os.environ["CLOUDTRAIN_OUTPUT_DIR"]
os.makedirs(out, exist_ok=True)
open(os.path.join(out, "notes.txt"), "w").write("made")
while os.path.exists(sys.argv[2]):
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def team(console, tmp_path_factory):
    """Two runs that have ended and one that goes on, submitted from another home and attached; yields their ids."""
    folder = tmp_path_factory.mktemp("team")
    (folder / "source").mkdir()
    (folder / "source" / "train.py").write_text(SCRIPT)
    live = folder / "live"
    live.touch()
    ids = []
    for number in range(3):
        job = {
            "name": "shared", "source": str(folder / "source"), "entrypoint": "train.py", "output": str(folder / "runs"),
            "args": [str(number + 1), str(live if number == 2 else folder / "none")], "labels": {"user": "another"},
            "environment": {"requirements": "none"},
        }  # fmt: skip
        run = Submitter("local", home=folder / "home").submit(job)
        run.acknowledge()
        ids.append(run.run_id)
        if number < 2:
            assert run.wait(120).state is State.SUCCEEDED
    wait_for(lambda: attach_all(str(folder / "runs"), console.home) and Store(console.home).get(ids[2]), "the live run")
    yield ids
    live.unlink()
    assert run.wait(120).state is State.SUCCEEDED


def test_a_comparison_reads_the_metrics_of_runs_that_were_never_shown(console, page, team):
    assert all(Store(console.home).is_unread(run_id) for run_id in team[:2])
    page.goto(f"{console.root}/compare?runs={team[0]},{team[1]}")
    expect(page.get_by_label("Results")).to_contain_text("loss")
    expect(page.get_by_label("Results")).to_contain_text("0.4")


def test_the_list_and_a_run_say_who_submitted_it_and_offer_only_what_works(console, page, team, seemly):
    page.goto(console.root + "/")
    row = page.get_by_role("row", name=team[0])
    expect(row.get_by_role("cell", name=label(getpass.getuser()), exact=True)).to_be_visible()
    expect(page.get_by_role("columnheader", name="user")).to_be_visible()
    page.goto(f"{console.root}/runs/{team[2]}")
    expect(page.get_by_text("submitted by")).to_be_visible()
    expect(page.get_by_text("read only")).to_be_visible()
    expect(page.get_by_role("button", name="Report")).to_be_visible()
    for name in ("Cancel", "Rerun with changes"):
        expect(page.get_by_role("button", name=name)).to_have_count(0)
    page.goto(f"{console.root}/runs/{team[0]}")
    expect(page.get_by_role("link", name="notes.txt")).to_be_visible()
    expect(page.get_by_text("is missing")).to_have_count(0)
    expect(page.get_by_text("trained")).to_be_visible()
    seemly(page)
