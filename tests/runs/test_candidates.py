"""Jobs that name several targets or accelerators: what a plan shows of each, and which one is chosen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.backends.plan import Fact, Note
from cloudtrain.errors import BackendError, BadJob, UnknownBackend
from cloudtrain.events import State, Status
from cloudtrain.history.records import AttemptRecord
from cloudtrain.job import targets
from cloudtrain.runs.planning import attempts, candidates
from cloudtrain.runs.sending.resume import plan_next
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend, SubmittedAttempt
from tests.runs.platform import dead

CONFIG = """
[targets.prod]
backend = "prod"
usd_per_hour = 32.0

[targets.gke]
backend = "memory"
usd_per_hour = 12.5

[targets.lab]
backend = "ssh"
hosts = [{address = "10.0.0.5", user = "ml"}]

[targets.grid]
backend = "slurm"
folder = "/shared"
"""


class Prod(MemoryBackend):
    """Another platform."""

    name = "prod"
    attempts: ClassVar[dict[str, SubmittedAttempt]] = {}


@pytest.fixture
def project(source: Path, memory, monkeypatch: pytest.MonkeyPatch) -> Path:
    Prod.install()
    (source / "cloudtrain.toml").write_text(CONFIG)
    monkeypatch.chdir(source)
    return source


def write_job(project: Path, text: str) -> Path:
    file = project / "job.yaml"
    file.write_text(f"entrypoint: train.py\nlimits: {{max_runtime: 2h, max_wait: 30m}}\n{text}")
    return file


def test_the_cheapest_possible_candidate_is_chosen(project, cli):
    """The lab is a backend without instance types: it is not possible, and says why."""
    file = write_job(
        project, "target: [prod, gke, lab]\nresources: {instance_type: big, accelerators: ['H100:8', 'A100:8']}"
    )
    plan = Submitter(watch=False).plan(file)
    assert (plan.target, plan.job["resources"]["accelerators"], plan.job["target"]) == ("gke", "H100:8", "gke")
    rows = [(row["target"], row["accelerators"], row.get("total_usd")) for row in plan.candidates]
    possible = [("gke", "H100:8", 25.0), ("gke", "A100:8", 25.0), ("prod", "H100:8", 64.0), ("prod", "A100:8", 64.0)]
    assert rows == [*possible, ("lab", "H100:8", None), ("lab", "A100:8", None)]
    assert "does not offer instance types" in plan.candidates[-1]["why_not"]
    assert Plan.from_json(plan.to_json()) == plan
    code, out, _ = cli("plan", str(file))
    assert code == 0 and "would go to gke (memory)" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["prod", "prod", "H100:8", "32.00", "64.00"] in lines
    assert ["lab", "A100:8", "resources.instance_type:", "the"] in [line[:4] for line in lines]


def test_a_cap_does_not_change_the_order_and_no_total_is_above_it(project, cli):
    file = write_job(project, "target: [prod, gke]\nresources: {accelerators: 'H100:8'}")
    file.write_text(file.read_text().replace("max_wait", "max_cost: 20 USD, max_wait"))
    plan = Submitter(watch=False).plan(file)
    assert [(row["target"], row["total_usd"]) for row in plan.candidates] == [("gke", 20.0), ("prod", 20.0)]
    _, out, _ = cli("plan", str(file))
    lines = [line.split() for line in out.splitlines()]
    assert any(line[:2] == ["prod", "prod"] and line[-3:] == ["20.00", "37m", "30s"] for line in lines), out
    assert "cap lasts: the time that 20 USD buy there (limits.max_cost)" in out
    assert "order: cheapest first (prefer: cost), which limits.max_cost does not change" in out
    assert "USD in all: one attempt of 2h (limits.max_runtime), but not more than 20 USD (limits.max_cost)" in out


def test_with_a_forecast_what_is_expected_stands_beside_what_is_paid_at_most(project, cli):
    fit = "fit: {model: llama-3.2-1b, batch: 4, sequence: 2048, precision: bf16, steps: 200}"
    file = write_job(project, f"target: [gke, prod]\nresources: {{accelerators: 'H100:1'}}\n{fit}")
    plan = Submitter(watch=False).plan(file)
    assert [row["of"] for row in plan.candidates] == ["forecast", "forecast"]
    _, out, _ = cli("plan", str(file))
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["prod"])
    found = plan.candidates[1]
    assert row[-2:] == [f"{found['total_usd']:.2f}", f"{found['at_most']['usd']:.2f}"], out
    assert found["total_usd"] < found["at_most"]["usd"] and "USD in all: the forecast" in out and "at most" in out


def test_a_wait_is_no_matter_of_the_platform_where_there_are_candidates(project):
    """Slurm does not end a wait: cloudtrain moves the run, and the plan says so."""
    for target in ("[gke, grid]", "[grid, gke]", "[grid, prod]"):
        plan = Submitter(watch=False).plan(write_job(project, f"target: {target}\nprefer: order\n"))
        (note,) = [note for note in plan.notes if "max_wait" in note]
        assert "kept by the watcher, not by " in note and "grid" in note and "stays pending" in note, target
    plan = Submitter(watch=False).plan(write_job(project, "target: grid\n"))
    assert [note for note in plan.notes if "limits.max_wait needs several targets or GPUs" in note]


def test_what_a_note_says_is_its_fact_and_not_its_words(project):
    """With candidates the watcher ends a wait: notes that deny it go, others stay, whatever their words are."""
    submitter = Submitter(watch=False)
    file = write_job(project, "target: [gke, prod]\n")
    chosen = targets.choices(file, [])
    notes = {
        "gke": ("limits.max_wait: this platform supports it", Note("no end", Fact.WAIT_OVERRULED)),
        "prod": (Note("it waits and waits", Fact.WAIT_UNLIMITED),),
    }

    def make(choice: targets.Choice) -> Plan:
        plan = Submitter(choice.target, watch=False).plan(file)
        return replace(plan, notes=notes[plan.target])

    found = candidates.choose(chosen, make).notes
    assert notes["gke"][0] in found and "no end" not in found
    assert [note for note in found if "kept by the watcher, not by prod:" in note]
    assert Plan.from_json(submitter.plan(file).to_json()).notes == submitter.plan(file).notes


def test_the_cost_line_of_each_target_is_its_own(project, cli):
    file = write_job(project, "target: [gke, prod]\nresources: {accelerators: 'H100:8'}\n")
    _, out, _ = cli("plan", str(file))
    plan = Submitter(watch=False).plan(file)
    cheap, dear = (row["at_most"]["usd"] for row in plan.candidates)
    (line,) = [" ".join(line.split()) for line in out.splitlines() if line.startswith("  cost ")]
    assert line.startswith(f"cost at most {cheap:.2f} USD (1 attempt") and cheap < dear
    assert f"at most {dear:.2f} USD if it moves to prod (H100:8)" in " ".join(out.split())
    (price,) = [line for line in out.splitlines() if line.startswith("  price ")]
    assert "(usd_per_hour of the target gke" in price
    _, by_hand, _ = cli("plan", str(file), "-t", "gke", "--set", "resources.usd_per_hour=7")
    assert "7.0 USD an hour (resources.usd_per_hour" in by_hand
    _, shown, _ = cli("plan", str(file), "-t", "prod")
    assert f"at most {dear:.2f} USD" in shown and "moves to" not in shown


def test_the_order_given_and_the_choice_by_hand(project):
    file = write_job(project, "target: [prod, gke]\nprefer: order\nresources: {accelerators: ['H100:8', 'A100:8']}")
    submitter = Submitter(watch=False)
    assert [row["target"] for row in submitter.plan(file).candidates] == ["prod", "prod", "gke", "gke"]
    by_hand = Submitter("gke", watch=False).plan(file, sets=["resources.accelerators=A100:8"])
    assert (by_hand.target, by_hand.job["resources"]["accelerators"], by_hand.candidates) == ("gke", "A100:8", ())
    assert submitter.resolve(file).target == "prod"  # of several the first, where no plan is made


def test_each_candidate_has_its_own_exact_plan(project):
    """What is stored of a candidate is what its plan has when it is chosen by hand."""
    file = write_job(project, "target: [prod, gke]\n")
    row = next(row for row in Submitter(watch=False).plan(file).candidates if row["target"] == "prod")
    assert row["job"] == Submitter("prod", watch=False).plan(file).job


def test_what_is_wrong_with_all_is_said_once(project):
    file = write_job(project, "target: [prod, lab]\nresources: {instance_type: big}\nnum_nodes: 0\n")
    with pytest.raises(BadJob) as error:
        Submitter(watch=False).plan(file)
    assert [problem.path for problem in error.value.problems] == ["num_nodes"]
    file = write_job(project, "target: [lab, local]\nresources: {instance_type: big}\n")
    with pytest.raises(BadJob) as error:
        Submitter(watch=False).plan(file)
    assert [str(p).rpartition("does not offer")[2].count("(l") for p in error.value.problems] == [1, 1]
    with pytest.raises(UnknownBackend, match="there is no target gek"):
        Submitter(watch=False).plan(write_job(project, "target: [prod, gek]\n"))


@pytest.mark.parametrize("text", ["target: []", "target: [[prod]]", "resources: {accelerators: []}", "target: {a: b}"])
def test_a_list_that_is_none(project, text):
    with pytest.raises(BadJob):
        Submitter(watch=False).plan(write_job(project, f"{text}\n"))


def test_a_wrong_item_is_found_at_its_line(project):
    file = write_job(project, "target: prod\nresources:\n  accelerators:\n  - H100:8\n  - 8 A100\n")
    plan = Submitter(watch=False).plan(file)
    assert [bool(row["why_not"]) for row in plan.candidates] == [False, True]
    assert "must be a name and a count" in plan.candidates[1]["why_not"]


def test_a_question_is_about_the_dearest_candidate(project):
    """The run may go there: what it costs on the cheapest one is not what a person is asked about."""
    (project / "cloudtrain.toml").write_text(f'[budgets]\nconfirm_above = "40 USD"\n{CONFIG}')
    asked = []
    Submitter(watch=False, confirm=asked.append).submit(write_job(project, "target: [prod, gke]\n"))
    assert len(asked) == 1 and "64.27 USD" in asked[0]


def test_a_key_is_found_at_every_candidate(project, home, tmp_path):
    """Another machine's history has nothing of the run: it asks all platforms, not only the one that it would choose."""
    file = write_job(project, "target: [prod, gke]\n")
    first = Submitter("prod", watch=False).submit(file, key="K")
    again = Submitter(home=tmp_path / "other", watch=False).submit(file, key="K")
    assert (again.run_id, again.adopted, again.attempts[0].handle) == (first.run_id, True, first.attempts[0].handle)
    assert again.record.target == "prod"
    assert len(Prod.attempts) + len(MemoryBackend.attempts) == 1


def test_an_interrupted_submit_of_candidates_is_taken_up(project):
    file = write_job(project, "target: [prod, gke]\n")
    submitter = Submitter(watch=False)
    plan, _ = submitter.plan_job(file)
    assert submitter.store.intend(plan, identity=plan.identity, owner=dead())
    run = submitter.submit(file)
    assert (run.run_id, run.adopted, run.record.target) == (plan.run_id, True, "gke")
    assert [attempt.handle for attempt in run.attempts] == [f"{plan.run_id}-a1"]


def test_a_resume_on_one_target_says_that_the_others_are_not_tried(project):
    submitter = Submitter(watch=False)
    run = submitter.submit(write_job(project, "target: [prod, gke]\n"))
    for target, sets in (("prod", []), (None, ["limits.max_runtime=3h"])):
        _, _, notes = plan_next(submitter.store, run.attempts, sets, target)
        assert [note for note in notes if note.startswith(f"only {target or 'gke'} is tried: ")]
    assert not any("is tried" in note for note in plan_next(submitter.store, run.attempts)[2])


@pytest.mark.parametrize("cap", [None, "max_cost=50USD"])
def test_a_moved_attempt_may_cost_as_much_as_the_dearest_candidate(project, home, cap):
    """It is on the cheapest one, what follows may be elsewhere, and the attempt that found no machines does not count."""
    file = write_job(project, "target: [prod, gke]\nretry: {max_attempts: 3}\n")
    plan = Submitter(watch=False, home=home).plan(file, sets=[f"limits.{cap}"] if cap else [])
    dearest = max(row["at_most"]["usd"] for row in plan.candidates)
    assert plan.at_most["usd"] == dearest and (not cap or dearest == 50)
    base = min(candidates.bases(plan), key=lambda base: base.target != "gke")
    refused = AttemptRecord(
        plan.attempt_id, plan.run_id, 1, plan, None, "", None, "", Status(State.FAILED, event="capacity"), {}
    )
    moved, _ = attempts.replan(base, 2, attempts.backend_of(base, home), home, earlier=[refused])
    assert moved.at_most["attempts"] == (1 if moved.retries == "platform" else 3)
    assert moved.at_most["usd"] == pytest.approx(dearest, abs=0.01)


def test_what_to_do_about_an_impossible_candidate_is_said_and_empty_columns_are_left_out(project, cli):
    (project / "cloudtrain.toml").write_text(CONFIG + '[targets.bare]\nbackend = "memory"\n')
    file = write_job(project, "target: [gke, bare]")
    file.write_text(file.read_text().replace("30m}", "30m, max_cost: 50 USD}"))
    code, out, _ = cli("plan", str(file))
    assert code == 0 and "why not: set usd_per_hour in section [targets.bare] of cloudtrain.toml;" in out
    assert "resources.usd_per_hour" not in out
    (head,) = [line for line in out.splitlines() if line.startswith("candidate")]
    assert "fit" not in head and "time" not in head
    assert "fit, time: not estimated for this script" in out


def test_who_is_not_tried_is_named_in_the_plan_the_submits_error_and_show(project, cli, monkeypatch):
    """A missing price under a cap, and a platform that lacks something: one is left, and no next target is promised."""
    (project / "cloudtrain.toml").write_text(CONFIG + '[targets.bare]\nbackend = "memory"\n')
    file = write_job(project, "target: [gke, bare, lab]\nresources: {instance_type: big}")
    file.write_text(file.read_text().replace("max_wait: 30m}", "max_cost: 50 USD}"))
    (note,) = [note for note in Submitter(watch=False).plan(file).notes if note.startswith("not tried: ")]
    assert "bare: " in note and "limits.max_cost" in note and "lab: " in note and "instance types" in note
    assert not any("next target" in note for note in Submitter(watch=False).plan(file).notes)

    def refuse(self, plan, bundle):
        raise BackendError("the quota is used up")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryBackend, "submit", refuse)
        with pytest.raises(BackendError, match="the quota is used up; not tried: .*bare: .*lab: ") as caught:
            Submitter(watch=False).submit(file)
    (run,) = Submitter(watch=False).store.runs()
    assert run.status.reason == caught.value.message
    accepted = Submitter(watch=False).submit(file, new=True)
    MemoryBackend.finish(accepted.attempts[0].handle)
    _, shown, _ = cli("show", accepted.run_id)
    assert "not tried" in shown and "bare: " in shown and "lab: " in shown


def test_a_candidate_without_a_price_is_named_beside_the_bound(project, cli):
    (project / "cloudtrain.toml").write_text(CONFIG + '[targets.bare]\nbackend = "memory"\n')
    _, shown, _ = cli("plan", str(write_job(project, "target: [gke, bare]")))
    out = " ".join(shown.split())
    assert "cost at most 25." in out and "; bare: price not known (set usd_per_hour in section [targets.bare]" in out


def test_a_plan_shows_the_setup(project, cli):
    file = write_job(project, "setup: |\n  pip install a\n  pip install b")
    assert re.search(r"^  setup +pip install a \.\.\.$", cli("plan", str(file), "-t", "gke")[1], re.MULTILINE)
