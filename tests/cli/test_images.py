"""Which container image each node ran: asked of the backend, kept with the attempt, shown, compared."""

from __future__ import annotations

import pytest

from cloudtrain.backends import registry
from cloudtrain.backends.images import Reference, describe_images, parse_reference, pinned_image, with_digest
from cloudtrain.errors import BackendError
from cloudtrain.events import State, Status
from cloudtrain.job.units import now
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching import watch
from cloudtrain.testing.memory import MemoryBackend

ONE, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train", ("docker.io", "library/train", "latest", "")),
        ("team/train:3", ("docker.io", "team/train", "3", "")),
        ("localhost/train", ("localhost", "train", "latest", "")),
        ("localhost:5000/a/b:c", ("localhost:5000", "a/b", "c", "")),
        ("123456789012.dkr.ecr.eu-west-1.amazonaws.com/x", ("123456789012.dkr.ecr.eu-west-1.amazonaws.com", "x", "latest", "")),
        (f"quay.io/a/b:c@{ONE}", ("quay.io", "a/b", "c", ONE)),
        ("quay.io/a@sha256:short", ("quay.io", "a", "latest", "")),
    ],
)  # fmt: skip
def test_a_name_has_the_parts_that_docker_sees(text: str, parts: tuple[str, ...]):
    assert parse_reference(text) == Reference(*parts)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (f"docker.io/library/a@{ONE}", f"docker.io/library/a@{ONE}"),
        (f"docker-pullable://a/b:c@{ONE}", f"a/b:c@{ONE}"),
        (f"docker://{ONE}", ONE),
        (ONE, ONE),
        ("a:latest", ""),
        ("", ""),
        (f"a@{ONE}\n", ""),
        (f"a\x1b[2J@{ONE}", ""),
        (f"{'a' * 500}@{ONE}", ""),
        (f"@{ONE}", ""),
        (ONE.upper(), ""),
    ],
)
def test_only_what_names_one_image_is_kept(said: str, kept: str):
    assert pinned_image(said) == kept


def test_a_digest_stands_behind_the_tag():
    assert with_digest("a/b:c", ONE) == f"a/b:c@{ONE}" and with_digest(f"a/b:c@{OTHER}", ONE) == f"a/b:c@{ONE}"
    assert with_digest("a/b:c", "sha1:0") == ""


def test_nodes_that_run_the_same_need_one_line():
    assert describe_images({}) == [] and describe_images({0: ONE, 1: ONE}) == [ONE]
    assert describe_images({2: OTHER, 0: ONE, 1: ONE}) == [f"nodes 0, 1: {ONE}", f"node 2: {OTHER}"]
    assert describe_images({0: f"a@{ONE}", 1: f"mirror/a@{ONE}"}) == [f"a@{ONE}"], "one image by two names"


@pytest.fixture
def run(home, tmp_path, monkeypatch) -> Run:
    """A run on two nodes that starts nothing and goes on until it is finished."""
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    MemoryBackend.install()
    return submitted(tmp_path)


def submitted(tmp_path) -> Run:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "train.py").write_text("print(1)\n")
    job = {"name": "x", "source": str(source), "entrypoint": "train.py", "num_nodes": 2}
    return Submitter("memory", watch=False).submit(job)


def newest(run: Run) -> str:
    handle = run.attempts[-1].handle
    assert handle is not None
    return handle


def look(run: Run) -> None:
    """Let a watcher look once."""
    assert watch.Watcher(run.store, run.run_id).refresh() is not None


def test_it_is_asked_when_the_run_runs_and_what_was_missing_at_its_end(run: Run):
    remembered = MemoryBackend.attempts[newest(run)]
    remembered.images = {1: f"a@{ONE}"}
    look(run)
    assert run.attempts[-1].images == {1: f"a@{ONE}"}
    remembered.images = {0: f"a@{OTHER}"}
    look(run)
    assert run.attempts[-1].images == {1: f"a@{ONE}"}, "nothing has changed"
    MemoryBackend.finish(newest(run), State.SUCCEEDED, 0)
    look(run)
    assert run.attempts[-1].images == {0: f"a@{OTHER}", 1: f"a@{ONE}"}


def test_a_start_anew_by_the_platform_counts(run: Run):
    remembered = MemoryBackend.attempts[newest(run)]
    remembered.images = {0: f"a@{ONE}", 1: f"a@{ONE}"}
    look(run)
    for status, images_now in (
        (Status(State.STARTING), {}),
        (Status(State.RUNNING, started_at=now()), {1: f"a@{OTHER}"}),
    ):
        remembered.status, remembered.images = status, images_now
        look(run)
    assert run.attempts[-1].images == {0: f"a@{ONE}", 1: f"a@{OTHER}"}


@pytest.mark.parametrize("error", [BackendError("AWS denies ecr:BatchGetImage"), KeyError("imageId"), ValueError("[x")])
def test_a_backend_that_will_not_say_or_says_nonsense_is_in_nobodys_way(run: Run, monkeypatch, capfd, error: Exception):
    MemoryBackend.attempts[newest(run)].images = {0: "latest", 1: f"\x1b[2J@{ONE}"}
    look(run)
    assert run.attempts[-1].images == {}

    def denied(self, handle: str) -> dict[int, str]:
        raise error

    monkeypatch.setattr(MemoryBackend, "images", denied)
    MemoryBackend.finish(newest(run), State.SUCCEEDED, 0)
    look(run)
    assert run.store.find(run.run_id).status.state is State.SUCCEEDED and run.attempts[-1].images == {}
    assert str(error) in capfd.readouterr().err, "the watcher's log says why it is not known"


def test_who_reads_a_run_finds_it_in_the_log_and_not_on_the_terminal(run: Run, home, monkeypatch, capfd):
    def denied(self, handle: str) -> dict[int, str]:
        raise BackendError("AWS denies ecr:BatchGetImage")

    monkeypatch.setattr(MemoryBackend, "images", denied)
    MemoryBackend.finish(newest(run), State.SUCCEEDED, 0)
    assert run.refresh().state is State.SUCCEEDED
    assert capfd.readouterr() == ("", "")
    assert f"{run.run_id}: AWS denies ecr:BatchGetImage\n" in (home / "watch.log").read_text()


def test_it_is_shown_and_compared(run: Run, tmp_path, cli):
    MemoryBackend.attempts[newest(run)].images = {0: f"a@{ONE}", 1: f"a@{ONE}"}
    other = submitted(tmp_path)
    MemoryBackend.attempts[newest(other)].images = {0: f"a@{ONE}", 1: f"a@{OTHER}"}
    for each in (run, other):
        MemoryBackend.finish(newest(each), State.SUCCEEDED, 0)
        look(each)
    assert f"image      a@{ONE}\n" in cli("show", run.run_id, "--verbose").out
    shown = cli("show", other.run_id, "--verbose").out
    assert f"node 0: a@{ONE}" in shown and f"node 1: a@{OTHER}" in shown
    assert cli("show", other.run_id, "--json").json["attempts"][0]["images"] == {"0": f"a@{ONE}", "1": f"a@{OTHER}"}
    (row,) = [
        row for row in cli("diff", run.run_id, other.run_id, "--json").json["differences"] if row["path"] == "image"
    ]
    assert (row["section"], row["first"]) == ("source", ONE) and ONE in row["second"] and OTHER in row["second"]
    page = tmp_path / "page.html"
    assert cli("report", run.run_id, "-o", str(page)).code == 0
    assert f"<tr><th>image</th><td>a@{ONE}</td></tr>" in page.read_text()


def test_a_run_of_an_older_history_has_none(run: Run):
    with run.store.database.write() as db:
        assert db.execute("SELECT images FROM attempts").fetchone()[0] is None
    assert run.attempts[-1].images == {}
