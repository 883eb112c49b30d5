"""A team's output: all runs below it in one history, read again only where something may have changed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.attached import backend as attached
from cloudtrain.cli import main
from cloudtrain.errors import BadRequest
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs import attached_history
from cloudtrain.runs.attach import attach_all
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch_all import watch_run
from tests.stores import GCS, S3, running

sys.path.insert(0, str(Path(__file__).parents[2] / "entrypoints"))
from launcher.output import history, index, store  # noqa: E402


def record(run_id: str, state: str = "SUCCEEDED", attempt: int = 1, user: str = "ann", **more: Any) -> bytes:
    """Return a run.json as the launcher writes it; a test compares one with a real run's."""
    at = "2026-11-20T10:15:00.000000Z"
    return json.dumps(
        {
            "version": 1, "run_id": run_id, "attempt": attempt, "start": "20261120T101500.000000Z-x", "state": state,
            "exit_code": 0 if state == "SUCCEEDED" else None, "reason": "", "started_at": at, "ended_at": at,
            "final": state == "SUCCEEDED", "updated_at": "2126-11-20T10:15:00.000000Z", "platform": "sagemaker",
            "manifest": {"nodes": 1, "processes_per_node": 1, "argv": ["train.py"]},
            "about": {"backend": "sagemaker", "job": {"name": "team", "entrypoint": "train.py", "labels": {"user": user}}},
            **more,
        }
    ).encode()  # fmt: skip


def name(number: int) -> str:
    return f"team-261120-101500-{number:04d}"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    for number in range(5):
        write(folder, number, state="RUNNING" if number == 4 else "SUCCEEDED", user=("ann", "bob")[number % 2])
    return folder


def write_history(folder: Path, number: int, **more: Any) -> None:
    write(folder, number, f"history/{name(number)}-a1/20261120T101500.000000Z-x", **more)


def write(folder: Path, number: int, base: str = "", **more: Any) -> None:
    path = folder / name(number) / base / "run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(record(name(number), **more))


def test_it_lists_all_and_reads_again_only_what_may_have_changed(output: Path, home: Path, monkeypatch):
    read = []
    real = attached.newest_attempt
    monkeypatch.setattr(attached, "newest_attempt", lambda files, name: (read.append(name), real(files, name))[1])
    found = attach_all(str(output), home)
    assert found.added == [name(number) for number in range(5)] and len(read) == 5
    write(output, 4)
    write(output, 5, base="checkpoints/.cloudtrain", state="FAILED")  # as on SageMaker
    read.clear()
    found = attach_all(f"{output}/", home)
    assert (found.added, found.updated, len(found.ended)) == ([name(5)], [name(4)], 4)
    assert sorted(read) == [name(4), name(5)]
    states = {run.run_id: run.status.state for run in Store(home).runs(limit=10)}
    assert states == {name(number): State.SUCCEEDED for number in range(5)} | {name(5): State.FAILED}
    write(output, 0, state="RUNNING", attempt=2)  # resumed elsewhere
    assert attach_all(str(output), home).updated == []
    assert name(0) in attach_all(str(output), home, again=True).updated
    assert Store(home).find(name(0)).status.state is State.RUNNING
    assert [attempt.number for attempt in Store(home).attempts(name(0))] == [1, 2]


def test_what_others_wrote_is_not_believed(output: Path, home: Path, tmp_path: Path):
    write(output, 6)
    (output / name(6) / "run.json").write_bytes(record(name(7)))  # of another run
    for number, content in ((7, b"{"), (8, b"[" * 5000), (9, b"x" * (5 << 20)), (10, b'{"attempt": true}')):
        (output / name(number)).mkdir()
        (output / name(number) / "run.json").write_bytes(content)
    os.symlink(tmp_path, output / "link")
    (output / "Not A Run").mkdir()
    (output / "empty").mkdir()
    found = attach_all(str(output), home)
    assert found.added == [name(number) for number in range(5)]
    assert list(found.unreadable) == [name(9)] and "it does not belong to a run's history" in found.unreadable[name(9)]
    with pytest.raises(BadRequest, match="there is no run below"):
        attach_all(str(output / "empty"), home)


@pytest.mark.parametrize("kind", [S3, GCS])
def test_an_object_store_is_listed_in_pages(kind: type, home: Path, monkeypatch):
    monkeypatch.setattr("cloudtrain.backends.attached.run.HISTORIES", ("",))
    with running(kind) as store:
        for key, value in store.environ.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")
        count = 25 if kind is S3 else 5
        for number in range(count):
            store.put(f"runs/{name(number)}/run.json", record(name(number)))
            if number < 3:
                store.put(f"runs/{name(number)}/logs/x/0", b"x")
        found = attach_all(f"{store.scheme}://bucket/runs", home)
        assert len(found.added) == count and not found.unreadable
        changes = list(getattr(store, "changes", []))
        assert len(attach_all(f"{store.scheme}://bucket/runs", home).ended) == count
        assert list(getattr(store, "changes", [])) == changes, "nothing is written there"


def test_ls_costs_and_show_have_who_submitted_what(output: Path, capsys):
    assert main(["attach", "--all", str(output)]) == 0
    printed = capsys.readouterr().out
    assert f"5 runs below {output}" in printed and "new         5" in printed
    assert main(["ls", "--columns", "label.user", "state:succeeded", "label.user=bob"]) == 0
    rows = capsys.readouterr().out
    assert rows.count("bob") == 2 and "ann" not in rows
    assert main(["costs", "--by", "user", "--json"]) == 0
    assert {"ann", "bob"} <= {
        value for row in json.loads(capsys.readouterr().out) for value in row.values() if isinstance(value, str)
    }
    assert main(["cancel", name(4)]) == 2, "read only"
    assert main(["attach", "--again", str(output)]) == 2


@pytest.mark.usefixtures("census")
def test_a_real_run_is_listed_and_shown_with_its_log(tmp_path: Path, home: Path, monkeypatch, capsys):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(
        'print(\'::cloudtrain::{"kind": "metric", "step": 1, "loss": 0.5}\')\nprint(\'here\')\nprint(\'step 3 acc 0.25\')\n'
    )
    output = tmp_path / "runs"
    job = {"name": "team", "source": str(source), "entrypoint": "train.py", "output": str(output)}
    run = Submitter("local", home=home, watch=False).submit(job)
    assert watch_run(run.store, run.run_id).state is State.SUCCEEDED
    real = json.loads((output / run.run_id / "run.json").read_text())
    assert real.keys() <= json.loads(record("a")).keys() | {"epoch", "world"} | real.keys()
    assert set(json.loads(record("a"))) <= set(real), "the test's records have only what real ones have"
    assert attach_all(str(output), home).own == [run.run_id], "it was submitted from here"
    other = tmp_path / "other"
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(other))
    assert attach_all(str(output), other).added == [run.run_id]
    assert main(["metrics", run.run_id, "--json"]) == 0
    shown = capsys.readouterr().out
    assert {"loss", "acc"} <= {json.loads(line)["name"] for line in shown.splitlines() if '"name"' in line}
    assert main(["logs", run.run_id]) == 0
    assert "here" in capsys.readouterr().out
    assert main(["show", run.run_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "SUCCEEDED"


def test_the_log_of_an_ended_run_is_copied_once_and_again_after_the_run_was_listed_again(
    output: Path, home: Path, monkeypatch
):
    for number in range(5):
        write_history(output, number, state="RUNNING" if number == 4 else "SUCCEEDED")
    calls = []
    refresh = attached_history.refresh
    monkeypatch.setattr(attached_history, "refresh", lambda *args: calls.append(args[1]) or refresh(*args))
    attach_all(str(output), home)
    for _ in range(2):
        assert Run.find(name(0), home).refresh().state is State.SUCCEEDED
    assert calls == [name(0)], "it was read once, though its log is empty"
    assert len(attach_all(str(output), home).ended) == 4
    Run.find(name(0), home).refresh()
    assert calls == [name(0)]

    assert Run.find(name(4), home).refresh().state is State.RUNNING
    write(output, 4)
    write_history(output, 4)
    assert attach_all(str(output), home).updated == [name(4)]
    Run.find(name(4), home).refresh()
    assert calls == [name(0), name(4), name(4)], "what it has logged before its end is read"
    attach_all(str(output), home, again=True)
    Run.find(name(0), home).refresh()
    assert calls == [name(0), name(4), name(4), name(0)], "it may have been resumed"


def test_an_ended_run_whose_output_is_gone_keeps_its_end(output: Path, home: Path, capsys):
    attach_all(str(output), home)
    output.rename(output.with_name("moved"))
    assert Run.find(name(0), home).refresh().state is State.SUCCEEDED
    assert "no run history found at" in capsys.readouterr().err
    assert main(["show", name(0)]) == 0
    assert "SUCCEEDED" in capsys.readouterr().out
    assert main(["rm", name(0), "--yes"]) == 0
    assert not Store(home).is_unread(name(0)), "its mark is deleted with it"


def places(output: str):
    """Return the writers' view of an output: a folder, or a store."""
    return store.Store(output, "the output") if "://" in output else history.Folder(output)


@pytest.mark.parametrize("kind", [None, S3])
def test_concurrent_writers_of_the_index_lose_nothing(kind, tmp_path: Path, home: Path, monkeypatch):
    """400 starts end in 8 threads, each of which packs and merges; the list reads few files, and all of them are there."""
    monkeypatch.setattr(index, "PER_PACK", 8)
    monkeypatch.setattr(index, "PER_MERGE", 4)
    count = 400 if kind is None else 60
    with running(kind) if kind else contextlib.nullcontext() as there:
        for key, value in there.environ.items() if there else ():
            monkeypatch.setenv(key, value)
        output = "s3://bucket/runs" if there else str(tmp_path / "runs")

        def end(number: int) -> None:
            place, data = places(output), record(name(number), user=f"user-{number % 7}")
            place.write(f"{name(number)}/run.json", data)
            index.add(place, data, "end")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(end, range(count)))
        files = attached.AttachedBackend({}, home).read_index(output)
        assert sorted(files) == [name(number) for number in range(count)]
        names = [each for each in places(output).list(index.FOLDER + "/packed") if each.endswith(".jsonl")]
        left = [each for each in places(output).list(index.FOLDER + "/new") if each.endswith(".json")]
        assert len(names) + len(left) < count / 4 and any(each.startswith("1-") for each in names)
        monkeypatch.setattr("cloudtrain.runs.attach.INDEXED", 1)
        monkeypatch.setattr(attached, "newest_attempt", lambda *_: pytest.fail("a run of the index was read"))
        found = attach_all(output, home)
        assert len(found.added) == len(found.indexed) == count
        store_ = Store(home)
        assert store_.find(name(3)).job["labels"]["user"] == "user-3"


@pytest.mark.parametrize("damage", ["torn", "garbage", "huge", "missing", "folder", "foreign"])
def test_a_damaged_index_falls_back_to_the_runs(damage: str, output: Path, home: Path, monkeypatch):
    place = places(str(output))
    for number in range(4):
        index.add(place, record(name(number), user="from-index"), "end")
    (pack,) = [output / ".index" / "packed" / f"0-{'0' * 32}.jsonl"]
    pack.parent.mkdir()
    lines = [path.read_bytes() for path in sorted((output / ".index/new").iterdir())]
    for path in (output / ".index/new").iterdir():
        path.unlink()
    pack.write_bytes(b"\n".join(lines) + b"\n")
    whole = 4
    if damage == "torn":
        pack.write_bytes(b"\n".join(lines)[:-40])
        whole = 3
    elif damage == "garbage":
        pack.write_bytes(b"\xff" * 100 + b"\n[1]\n" + b"[" * 5000 + b"\n" + b"\n".join(lines[:2]))
        whole = 2
    elif damage == "huge":
        monkeypatch.setattr("cloudtrain.backends.attached.index.MOST_PACK", 100)
        whole = 0
    elif damage == "missing":
        pack.unlink()
        whole = 0
    elif damage == "folder":
        pack.unlink()
        pack.mkdir()
        whole = 0
    else:  # a record in the name of another run is only that run's
        pack.write_bytes(b"\n".join([*lines[:3], record("Not a run"), record(name(9))]))
        whole = 3
    monkeypatch.setattr("cloudtrain.runs.attach.INDEXED", 1)
    found = attach_all(str(output), home)
    assert found.added == [name(number) for number in range(5)] and len(found.indexed) == whole
    assert {run.run_id for run in Store(home).runs(limit=10)} == {name(number) for number in range(5)}


def test_a_run_that_is_live_again_is_read_from_its_folder(output: Path, home: Path, monkeypatch):
    place = places(str(output))
    index.add(place, record(name(0)), "end")
    later = record(name(0), state="RUNNING", attempt=2, start="20261121T101500.000000Z-y")
    (output / name(0) / "run.json").write_bytes(later)
    index.add(place, later, "begin")
    index.add(place, record(name(1)), "end")
    monkeypatch.setattr("cloudtrain.runs.attach.INDEXED", 1)
    found = attach_all(str(output), home)
    assert found.indexed == [name(1)] and Store(home).find(name(0)).status.state is State.RUNNING


@pytest.mark.usefixtures("census")
def test_a_real_run_is_in_the_index_after_its_end(tmp_path: Path, home: Path, monkeypatch, capsys):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("import os, sys\nsys.exit(os.environ['CLOUDTRAIN_ATTEMPT'] == '1')\n")
    output = tmp_path / "runs"
    job = {"name": "team", "source": str(source), "entrypoint": "train.py", "output": str(output)}
    run = Submitter("local", home=home, watch=False).submit(job)
    assert watch_run(run.store, run.run_id).state is State.FAILED
    index_of = attached.AttachedBackend({}, home).read_index
    assert json.loads(index_of(str(output))[run.run_id])["state"] == "FAILED"
    run.resume()
    assert watch_run(run.store, run.run_id).state is State.SUCCEEDED
    names = sorted(path.name for path in (output / ".index/new").iterdir())
    assert [each.split(".")[1] + each.split(".")[-2] for each in names] == ["a1end", "a2begin", "a2end"]
    newest = json.loads(index_of(str(output))[run.run_id])
    assert (newest["state"], newest["attempt"]) == ("SUCCEEDED", 2)
    monkeypatch.setattr("cloudtrain.runs.attach.INDEXED", 1)
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "other"))
    assert main(["attach", "--all", str(output)]) == 0
    assert "by index" in capsys.readouterr().out
    assert main(["show", run.run_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "SUCCEEDED"
