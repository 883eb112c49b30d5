"""A run's history as its launchers write it: beside its results, every start where no other one writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from launcher.log import KeptLog, Log
from launcher.manifest import Manifest as Received
from launcher.manifest import decode
from launcher.output import history
from launcher.output.history import Folder, History
from launcher.world.cluster import Cluster

from cloudtrain.backends.manifest import Manifest
from tests.conftest import wait_for
from tests.entrypoints.launching import Attempt
from tests.stores import S3, running


def orders(attempt: int = 1, **about: object) -> Received:
    made = Manifest("run", attempt, ("train.py",), 1, 1, output="/out", about=about)
    return decode(made.encode())


def cluster() -> Cluster:
    from launcher.world.cluster import resolve

    return resolve({"CLOUDTRAIN_NODE_RANK": "0", "CLOUDTRAIN_HOST": "127.0.0.1", "CLOUDTRAIN_MANIFEST_0": ""})


def log_in(folder: Path) -> Log:
    folder.mkdir(parents=True)
    return Log.in_folder(str(folder))


def record(path: Path) -> dict:
    return json.loads(path.read_text())


def pieces(top: Path, attempt: int = 1) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((top / "logs" / f"run-a{attempt}").rglob("0" + "[0-9]" * 7)))


FIELDS = {"state": "RUNNING", "started_at": "2026-01-01T00:00:00.000000Z"}


def test_a_start_is_told_at_its_beginning_and_at_its_end(tmp_path: Path):
    log = log_in(tmp_path / "node")
    told = History(Folder(str(tmp_path / "run")), orders(job={"name": "x"}), cluster(), log)
    log.say("hello")
    told.begin(FIELDS)
    begun = wait_for(lambda: list((tmp_path / "run").glob("history/run-a1/*/run.json")), "the first word")
    assert (record(begun[0])["state"], record(begun[0])["final"]) == ("RUNNING", False)
    assert record(begun[0])["about"] == {"job": {"name": "x"}} and record(begun[0])["manifest"]["argv"] == ["train.py"]
    log.say("the last word")
    log.close()
    told.finish({"state": "FAILED", "exit_code": 3})
    assert (record(begun[0])["state"], record(begun[0])["exit_code"], record(begun[0])["final"]) == ("FAILED", 3, True)
    assert (tmp_path / "run" / "run.json").read_bytes() == begun[0].read_bytes()
    assert pieces(tmp_path / "run") == (tmp_path / "node" / "log").read_bytes()


def test_a_replaced_start_does_not_touch_its_successors(tmp_path: Path):
    top = tmp_path / "run"
    older = History(Folder(str(top)), orders(1), cluster(), log_in(tmp_path / "a"))
    older.begin(FIELDS)
    wait_for(lambda: (top / "run.json").exists(), "the first word")
    newer = History(Folder(str(top)), orders(2), cluster(), log_in(tmp_path / "b"))
    newer.begin(FIELDS)
    newer.finish({"state": "SUCCEEDED"})
    older.finish({"state": "LOST"})
    assert (record(top / "run.json")["attempt"], record(top / "run.json")["state"]) == (2, "SUCCEEDED")
    states = {path.parts[-3]: record(path)["state"] for path in top.glob("history/*/*/run.json")}
    assert states == {"run-a1": "LOST", "run-a2": "SUCCEEDED"}


def test_no_secret_is_told(tmp_path: Path):
    log = log_in(tmp_path / "node")
    log.masks.hide('pl4nted "s3cret"')
    job = {"name": "x", "env": {"COPY": 'a pl4nted "s3cret" b'}, "labels": {'pl4nted "s3cret"': "x"}}
    told = History(Folder(str(tmp_path / "run")), orders(job=job, patch='+key = pl4nted "s3cret"'), cluster(), log)
    told.begin({**FIELDS, "reason": 'it said pl4nted "s3cret"'})
    told.finish({"state": "FAILED"})
    texts = [path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert texts and not [text for text in texts if "s3cret" in text]
    assert record(tmp_path / "run" / "run.json")["about"]["job"]["env"] == {"COPY": "a *** b"}


def test_behind_a_bound_only_events_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(history, "MOST", 100)
    monkeypatch.setenv("CLOUDTRAIN_SYNC_EVERY_S", "0.01")
    log = log_in(tmp_path / "node")
    told = History(Folder(str(tmp_path / "run")), orders(), cluster(), log)
    log.lines(0, [b"x" * 200])
    told.begin(FIELDS)
    wait_for(lambda: b"x" * 200 in pieces(tmp_path / "run"), "the first piece")
    wait_for(lambda: b"only metrics and states" in pieces(tmp_path / "run"), "the word about it")
    log.lines(0, [b"y" * 200, b'::cloudtrain::{"kind":"metric","loss":1}'])
    log.say("said by the launcher")
    log.close()
    told.finish({"state": "SUCCEEDED"})
    kept = pieces(tmp_path / "run")
    assert b"yyy" not in kept and b'"loss":1' in kept and b"said by the launcher" in kept


def test_a_place_that_takes_nothing_is_in_nobodys_way(tmp_path: Path):
    (tmp_path / "run").write_text("a file, where a folder should be")
    log = log_in(tmp_path / "node")
    told = History(Folder(str(tmp_path / "run")), orders(), cluster(), log)
    told.begin(FIELDS)
    log.say("hello")
    told.finish({"state": "SUCCEEDED"})
    assert (tmp_path / "run").read_text() == "a file, where a folder should be"


def test_a_log_on_standard_output_is_kept_and_forgotten(tmp_path: Path):
    read, write = os.pipe()
    log = KeptLog(write)
    log.say("hello")
    told = History(Folder(str(tmp_path / "run")), orders(), cluster(), log)
    told.begin(FIELDS)
    log.close()
    told.finish({"state": "SUCCEEDED"})
    os.close(write)
    with os.fdopen(read, "rb") as said:
        assert pieces(tmp_path / "run") == said.read()
    log.forget()
    assert log.copy is None


def test_every_node_brings_its_log_and_what_is_refused_is_told_too(tmp_path: Path):
    with running(S3) as store:
        script = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
        inputs = {"train": {"uri": "s3://bucket/nothing/", "mode": "copy"}}
        with Attempt(tmp_path / "a", script, nodes=2, output="s3://bucket/out", environ=store.environ) as attempt:
            assert attempt.run() == [0, 0]
            written = store.objects()
            for node in (0, 1):
                prefix = f"out/run/logs/run-a1/node-{node}/"
                found = b"".join(data for key, data in sorted(written.items()) if key.startswith(prefix))
                assert found == (attempt.folders[node] / "log").read_bytes()
                assert f"rank {node} of 2" in found.decode()
        with Attempt(tmp_path / "b", script, output="s3://bucket/b", inputs=inputs, environ=store.environ) as attempt:
            assert attempt.run() == [78]
        told = json.loads(store.objects()["b/run/run.json"])
        assert (told["state"], told["exit_code"]) == ("FAILED", 78) and "no files at s3://bucket" in told["reason"]
        assert told["epoch"] is None or told["epoch"] == 1


def test_without_an_output_nothing_is_written(tmp_path: Path):
    with Attempt(tmp_path, "print(1)") as attempt:
        assert attempt.run() == [0]
    assert not [*tmp_path.rglob("run.json"), *tmp_path.rglob("logs")]
