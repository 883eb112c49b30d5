"""A draft: its problems are the real ones, its plan is what is sent, once, and files stay below the folder."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from cloudtrain.console import fields
from cloudtrain.console.draft import Draft
from cloudtrain.errors import BadJob, BadRequest
from cloudtrain.events import State
from cloudtrain.history import table
from cloudtrain.runs.submit import Submitter

FIELDS = {field.name: field for field in fields.job_fields()}
SCRIPT = "import sys\nprint(sys.argv[1:])\n"


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A project's folder, in which the console was started."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    return folder


def filled(draft: Draft, **values: str) -> Draft:
    for name, text in {"name": "tiny", "entrypoint": "train.py", **values}.items():
        draft.form.set_field(FIELDS[name.replace("__", ".")], text)
    return draft


def test_a_blank_draft_becomes_a_run_once_however_often_it_is_sent(root, home, census):
    draft = filled(Draft.blank(home, root))
    draft.form.set_rows(("hyperparameters",), [("lr", "1e-4")])
    review = draft.review()
    assert review.problems == () and review.plan is not None
    assert not (home / "runs").exists()
    found = []
    threads = [threading.Thread(target=lambda: found.append(draft.submit(review).run_id)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (run,) = Submitter(home=home).store.runs()
    assert set(found) == {run.run_id} == {review.plan.run_id} and len(found) == 4
    from cloudtrain.runs.run import Run

    kept = Run.find(run.run_id, home)
    assert kept.wait(120).state is State.SUCCEEDED
    assert kept.attempts[0].plan == review.plan  # what was shown is what was sent
    assert [line.text for line in kept.logs() if line.rank == 0] == ["['--lr', '1e-4']"]


def test_the_saved_file_plans_what_the_draft_plans(root, home):
    draft = filled(Draft.blank(home, root), num_nodes="2", limits__max_runtime="10m")
    mine = draft.review().plan
    path = draft.save("job.yaml")
    assert path == root / "job.yaml" and path.read_text() == draft.form.text()
    theirs = Submitter(home=home).plan(path)
    for plan in (mine, theirs):
        assert plan.job["num_nodes"] == 2
    assert mine.bundle["files"] + 1 == theirs.bundle["files"]  # the job file lies in the source now
    assert mine.job == theirs.job and mine.manifest["argv"] == theirs.manifest["argv"]


def test_all_problems_at_once_with_the_paths_of_their_fields(root, home):
    draft = filled(Draft.blank(home, root), name="Bad Name", num_nodes="none", resources__accelerators="8")
    paths = {problem.path for problem in draft.problems()}
    assert paths == {"name", "num_nodes", "resources.accelerators"}
    with pytest.raises(BadJob) as caught:
        Submitter(home=home).resolve(draft.form.document())
    assert {problem.path for problem in caught.value.problems} == paths
    review = draft.review()
    assert review.plan is None and len(review.problems) == 3
    with pytest.raises(BadRequest, match="has problems"):
        draft.submit(review)


def test_a_problem_of_one_line_stands_at_what_is_written_there(root, home):
    draft = filled(Draft.blank(home, root))
    draft.form.set_rows(("env",), [("A", "1"), ("A", "2")])
    (problem,) = draft.problems()
    assert problem.path.startswith("env") and "given twice" in problem.message


def test_what_cannot_be_read_is_a_problem_too(root, home):
    draft = filled(Draft.blank(home, root))
    draft.form.set_rows(("hyperparameters",), [("layers", "[1, 2")])
    (problem,) = draft.problems()
    assert problem.path == "hyperparameters.layers"


def test_target_options_and_trainer_are_asked(root, home):
    nowhere = filled(Draft.blank(home, root), target="nowhere").problems()
    assert [problem.path for problem in nowhere] == ["target"]
    (root / "cloudtrain.toml").write_text('[targets.here]\nbackend = "local"\npythn = "x"\n')
    (problem,) = filled(Draft.blank(home, root), target="here").problems()
    assert problem.path == "options.local.pythn" and "python" in problem.hint
    (root / "cloudtrain.toml").unlink()
    shared = Draft.blank(home, root)
    shared.form.set_field(FIELDS["trainer"], "true")
    shared.form.set_rows(("hyperparameters",), [("max_steps", "many"), ("learning_rat", "1")])
    assert {p.path for p in shared.problems()} == {"hyperparameters.max_steps", "hyperparameters.learning_rat"}


def test_what_the_source_lacks_is_told_in_the_review(root, home):
    (problem,) = filled(Draft.blank(home, root), entrypoint="other.py").review().problems
    assert problem.path == "source" and "other.py is not there" in problem.message


def test_the_listing_is_that_of_package(root, home):
    (root / "data").mkdir()
    (root / "data" / "a.txt").write_text("x" * 10)
    found = filled(Draft.blank(home, root)).list_source()
    assert {file.path: file.size for file in found.files} == {"data/a.txt": 10, "train.py": len(SCRIPT)}
    assert found.packed_bytes and found.problem is None and found.root == str(root)


def test_refused_credentials_are_named_and_can_be_allowed(root, home):
    (root / ".env").write_text("TOKEN=x\n")
    draft = filled(Draft.blank(home, root))
    found = draft.list_source()
    assert ".env" in found.problem.message and ".env" in {file.path for file in found.files}
    draft.form.set_field(FIELDS["allow_secrets"], ".env")
    assert draft.list_source().problem is None


def test_a_run_opens_as_the_short_job_that_it_was(root, home):
    (root / "cloudtrain.toml").write_text(
        '[targets.here]\nbackend = "local"\n[defaults]\nlimits = {max_runtime = "1h"}\n'
    )
    (root / "job.yaml").write_text(
        "name: tiny\nentrypoint: train.py\nhyperparameters: {lr: 1e-4, layers: [2, 4]}\n"
        "target: here\nlabels: {team: nlp}\n"
    )
    run = Submitter(home=home, watch=False).submit(root / "job.yaml")
    run.cancel(60)
    draft = Draft.of_run(run.run_id, home, root, watch=False)
    text = draft.form.text()
    assert "1e-4" in text and '"1e-4"' not in text and "team: nlp" in text
    for word in ("user", "num_nodes", "retry", "options", "environment"):  # default, configured, or given anew
        assert word not in text
    plan = draft.review().plan
    assert plan.job == run.attempts[0].plan.job and plan.bundle["sha256"] == run.attempts[0].plan.bundle["sha256"]
    # A configuration that says something else since then may not change what the run was.
    (root / "cloudtrain.toml").write_text('[targets.here]\nbackend = "local"\n[defaults]\nnum_nodes = 2\n')
    again = Draft.of_run(run.run_id, home, root, watch=False)
    assert "max_runtime: 1h" in again.form.text() and "num_nodes: 1" in again.form.text()
    assert again.review().plan.job == run.attempts[0].plan.job


def test_what_is_internal_to_a_run_is_not_offered(root, home):
    job = {"name": "tiny", "source": str(root), "entrypoint": "train.py",
           "labels": {"team": "nlp", "sweep": "tune-1", "trial": "3"}, "env": {"SWEEP_TRIAL": "{}"}}  # fmt: skip
    run = Submitter(home=home, watch=False).submit(job)
    run.cancel(60)
    assert "cloudtrain_home" in run.record.job["labels"]
    draft = Draft.of_run(run.run_id, home, root, watch=False)
    assert draft.form.rows(("labels",)) == [("team", "nlp")]
    assert "label.cloudtrain_home" not in table.names(run.store) and "label.team" in table.names(run.store)
    assert not draft.is_call and draft.roles() == []


def test_the_roles_of_a_job_are_what_it_says(root, home):
    (root / "job.yaml").write_text(
        "name: rl\nroles:\n  trainer: {entrypoint: train.py, num_nodes: 2}\n  server: {run: python serve.py}\n"
    )
    draft = Draft.of_file("job.yaml", home, root, watch=False)
    assert draft.roles() == [("trainer (main)", "2", "train.py"), ("server", "1", "python serve.py")]


def test_a_rerun_with_a_change_keeps_its_parent_and_its_source(root, home):
    (root / "job.yaml").write_text("name: tiny\nentrypoint: train.py\nhyperparameters: {lr: 1e-4}\n")
    run = Submitter(home=home, watch=False).submit(root / "job.yaml")
    run.cancel(60)
    (root / "train.py").write_text("raise SystemExit(1)\n")
    draft = Draft.of_run(run.run_id, home, root, watch=False)
    assert draft.changes() == []
    draft.form.set_rows(("hyperparameters",), [("lr", "2e-4")])
    assert draft.changes() == [("hyperparameters.lr", "1e-4", "2e-4")]
    draft.same_source = False
    source = [change for change in draft.changes() if change[0] == "source"]
    assert source == [("source", f"as {draft.parent} packaged it", draft.form.get(("source",)))]
    draft.same_source = True
    assert [file.path for file in draft.list_source().files] == ["job.yaml", "train.py"]
    review = draft.review()
    assert review.plan.bundle["sha256"] == run.attempts[0].plan.bundle["sha256"]
    made = draft.submit(review)
    assert made.run_id != run.run_id and made.record.parent == run.run_id
    assert made.attempts[0].plan.manifest["argv"] == ["train.py", "--lr", "2e-4"]
    made.cancel(60)
    draft.same_source = False
    assert draft.review().plan.bundle["sha256"] != run.attempts[0].plan.bundle["sha256"]


@pytest.mark.parametrize(
    "name", ["../job.yaml", "/etc/job.yaml", "a/../../job.yaml", "out/job.yaml", "", "job", "job.txt", ".git/job.yaml",
             ".job.yaml", "no/job.yaml", "there.yaml", "link.yaml", "a\0.yaml", "folder.yaml", "x" * 2000 + ".yaml"]
)  # fmt: skip
def test_a_file_is_never_written_outside_or_over_another(name, root, home, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "out").symlink_to(outside)
    (root / "link.yaml").symlink_to(outside / "job.yaml")
    (root / ".git").mkdir()
    (root / "folder.yaml").mkdir()
    (root / "there.yaml").write_text("kept")
    before = tree(tmp_path)
    with pytest.raises(BadRequest):
        filled(Draft.blank(home, root)).save(name)
    if name in ("../job.yaml", "out/job.yaml", "link.yaml", "folder.yaml"):
        with pytest.raises(BadRequest):
            filled(Draft.blank(home, root)).save(name, overwrite=True)
    assert tree(tmp_path) == before


def test_a_file_is_written_over_where_that_is_said(root, home):
    (root / "job.yaml").write_text("name: before\n")
    draft = filled(Draft.blank(home, root))
    with pytest.raises(BadRequest, match="already exists"):
        draft.save("job.yaml")
    assert (root / "job.yaml").read_text() == "name: before\n"
    draft.save("job.yaml", overwrite=True)
    assert (root / "job.yaml").read_text() == draft.form.text()
    assert sorted(os.listdir(root)) == ["job.yaml", "train.py"]


def test_a_file_in_another_folder_means_the_same(root, home):
    (root / "jobs").mkdir()
    draft = filled(Draft.blank(home, root))
    path = draft.save("jobs/a.yaml")
    assert "source: .." in path.read_text()
    opened = Draft.of_file("jobs/a.yaml", home, root)
    assert opened.name == "jobs/a.yaml"
    assert opened.review().plan.job["source"] == str(root)


@pytest.mark.parametrize("name", ["../secret.yaml", "/etc/passwd", "pipe.yaml", "missing.yaml", "train.py", "out.yaml"])
def test_only_job_files_below_the_folder_are_opened(name, root, home, tmp_path):
    (tmp_path / "secret.yaml").write_text("name: x\n")
    (root / "out.yaml").symlink_to(tmp_path / "secret.yaml")
    os.mkfifo(root / "pipe.yaml")
    with pytest.raises(BadRequest):
        Draft.of_file(name, home, root)


def test_a_json_job_opens_too(root, home):
    (root / "job.json").write_text(
        json.dumps({"name": "tiny", "hyperparameters": {"lr": 0.1}, "entrypoint": "train.py"})
    )
    assert "lr: 0.1" in Draft.of_file("job.json", home, root).form.text()


def tree(folder: Path) -> dict[str, str]:
    found = {}
    for at, names, files in os.walk(folder):
        for name in (*names, *files):
            path = Path(at, name)
            found[str(path)] = path.read_text() if path.is_file() else ""
    return found
