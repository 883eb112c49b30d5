"""Exceptions into exit codes, sentences and JSON, in one place."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import click
import pytest

from cloudtrain.backends import registry
from cloudtrain.cli.view import failures
from cloudtrain.errors import BackendError, BadJob, BadRequest, MissingExtra, Problem, RunFailed, StoreError
from cloudtrain.events import State, Status
from cloudtrain.history.store import Store
from cloudtrain.testing.memory import MemoryBackend
from tests.cli.conftest import CLI
from tests.conftest import WAIT_S
from tests.history.test_repair import add_run

ERRORS = [
    (BadRequest("no", "do this"), 2),
    (BadJob([Problem("is wrong", "name")]), 2),
    (MissingExtra("the backend x", "x"), 2),
    (StoreError("the disk is full"), 2),
    (BackendError("refused"), 5),
    (RunFailed("r-1", Status(State.FAILED, 3)), 3),
    (RunFailed("r-1", Status(State.CANCELLED)), 130),
    (RunFailed("r-1", Status(State.TIMED_OUT)), 124),
    (RunFailed("r-1", Status(State.PREEMPTED)), 75),
    (RunFailed("r-1", Status(State.LOST)), 69),
    (click.UsageError("No such option."), 2),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), 2),
    (OSError(errno.ENOSPC, "No space left on device"), 2),
    (KeyboardInterrupt(), 130),
    (click.Abort(), 130),
    (MemoryError(), 1),
    (ZeroDivisionError("division by zero"), 1),
    (SystemExit(7), 7),
]


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=repr)
def test_exit_codes(error, code, capsys):
    assert failures.report(error, ["ls"]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    if not isinstance(error, SystemExit):
        assert said.err.startswith("error: ")


@pytest.mark.parametrize(("error", "code"), ERRORS[:-1], ids=repr)
def test_json_says_who_failed(error, code, capsys):
    failures.report(error, ["ls", "--json"])
    said = capsys.readouterr()
    data = json.loads(said.out)
    assert data["exit_code"] == code
    assert data["phase"] == ("run" if isinstance(error, RunFailed) else "client")
    assert isinstance(data["error"], str) and isinstance(data["hint"], str)
    assert said.err.startswith("error: ")  # for the person behind the pipe


def test_json_behind_the_dashes_is_the_scripts(capsys):
    failures.report(BadRequest("no"), ["submit", "x.py", "--", "--json", "--debug"])
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err


def test_problems_are_listed_each(capsys):
    error = BadJob([Problem("is wrong", "name", "like this", "job.yaml", 3), Problem("is missing", "source")])
    failures.report(error, ["plan", "--json"])
    said = capsys.readouterr()
    assert [problem["path"] for problem in json.loads(said.out)["problems"]] == ["name", "source"]
    assert json.loads(said.out)["problems"][0]["line"] == 3
    assert "job.yaml:3: name: is wrong (like this)" in said.err


def test_the_hint_of_a_usage_error_names_the_command(cli):
    shown = cli("ls", "--nope")
    assert shown.code == 2
    assert shown.err.splitlines()[-1] == "  hint: cloudtrain ls --help"


def test_control_sequences_in_a_message_are_not_obeyed(capsys):
    failures.report(BadRequest("a\x1b[2Jb\x07\nc", "d\x1b]0;title\x07e"), [])
    assert capsys.readouterr().err == "error: ab\nc\n  hint: de\n"


def test_the_unexpected_is_one_sentence_and_its_traceback_is_kept(home, capsys):
    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError as error:
        assert failures.report(error, ["ls"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: internal error: ZeroDivisionError: division by zero\n")
    (kept,) = (home / "errors").iterdir()
    assert str(kept) in said
    assert "Traceback (most recent call last)" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0 or kept.parent.stat().st_mode & 0o077 == 0


def test_the_kept_tracebacks_are_pruned(home, capsys):
    folder = home / "errors"
    folder.mkdir(parents=True)
    for number in range(60):
        (folder / f"000000-{number:06}.txt").touch()
    failures.report(ValueError("x"), [])
    assert len(list(folder.iterdir())) == 50
    assert any(file.stat().st_size for file in folder.iterdir())


def test_a_home_that_cannot_be_written_does_not_hide_the_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "file" / "home"))
    assert failures.report(ValueError("x"), []) == 1
    assert "ValueError: x" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["flag", "flag of the command", "environment"])
def test_debug_shows_the_traceback(cli, how, monkeypatch):
    if how == "environment":
        monkeypatch.setenv("CLOUDTRAIN_DEBUG", "1")
    words = {"flag": ["--debug", "show", "zz"], "flag of the command": ["show", "zz", "--debug"]}.get(
        how, ["show", "zz"]
    )
    shown = cli(*words)
    assert shown.code == 2
    assert "Traceback" in shown.err and "UnknownRun" in shown.err


# -- bad input: one sentence, a hint, exit 2 --------------------------------------------------------------------------


def no_source(folder: Path) -> list[str]:
    (folder / "job.yaml").write_text("name: x\nsource: nowhere\nentrypoint: train.py\n")
    return ["plan", "job.yaml"]


def no_entrypoint(folder: Path) -> list[str]:
    (folder / "job.yaml").write_text("name: x\nsource: .\nentrypoint: tran.py\n")
    return ["submit", "job.yaml"]


def unknown_key(folder: Path) -> list[str]:
    (folder / "job.yaml").write_text("name: x\nnum_node: 2\n")
    return ["submit", "job.yaml"]


def wrong_types(folder: Path) -> list[str]:
    (folder / "job.yaml").write_text("name: [x]\nnum_nodes: many\nrun: x\n")
    return ["plan", "job.yaml"]


def no_yaml(folder: Path) -> list[str]:
    (folder / "job.yaml").write_text("name: [x\n")
    return ["plan"]


def binary(folder: Path) -> list[str]:
    (folder / "job.yaml").write_bytes(b"\xff\xfe\x00")
    return ["plan", "job.yaml"]


def broken_plan(folder: Path) -> list[str]:
    (folder / "plan.json").write_text('{"request": {}}')
    return ["submit", "plan.json"]


def old_plan(folder: Path) -> list[str]:
    fields = dict.fromkeys(("backend", "run_id", "request", "manifest", "job"), {})
    (folder / "plan.json").write_text(json.dumps({**fields, "version": 99}))
    return ["submit", "plan.json"]


def a_fifo(folder: Path) -> list[str]:
    os.mkfifo(folder / "job.yaml")
    return ["plan", "job.yaml"]


def credentials(folder: Path) -> list[str]:
    (folder / "key.pem").write_text(
        "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEowIBAAKCAQEA\n-----END RSA PRIVATE KEY-----\n"
    )
    return ["plan", "train.py"]


def no_toml(folder: Path) -> list[str]:
    (folder / "cloudtrain.toml").write_text("[targets\n")
    return ["plan", "train.py", "-t", "x"]


def newer_history(folder: Path) -> list[str]:
    home = Path(os.environ["CLOUDTRAIN_HOME"])
    home.mkdir()
    with sqlite3.connect(home / "history.sqlite3") as db:
        db.execute("PRAGMA user_version = 999")
    return ["ls"]


def home_in_a_file(folder: Path) -> list[str]:
    Path(os.environ["CLOUDTRAIN_HOME"]).touch()
    return ["submit", "train.py"]


def missing_extra(folder: Path) -> list[str]:
    return ["plan", "train.py", "-t", "far"]


def sweep_file(project):
    (project / "sweep.yaml").write_text("program: train.py\nmethod: random\nparameters: {lr: {values: [1, 2]}}\n")
    return ["submit", "sweep.yaml"]


def batch_script(project):
    (project / "job.sbatch").write_text("#SBATCH --nodes=1\npython train.py\n")
    return ["plan", "job.sbatch"]


def bucket_with_a_path(backend, bucket):
    def words(project):
        return _plan_on(project, f'backend = "{backend}"\nproject = "p"\nbucket = "{bucket}"\n')

    words.__name__ = f"bucket_with_a_path_{backend}"
    return words


def host_as_text(project):
    return _plan_on(project, 'backend = "ssh"\nhosts = ["ml@10.0.0.6"]\n')


def mistyped_machine(project):
    return [*_plan_on(project, 'backend = "sagemaker"\n'), "--set", "resources.instance_type=ml.p4d.24xlage"]


def _plan_on(project, target):
    (project / "cloudtrain.toml").write_text(f"[targets.x]\n{target}")
    return ["plan", "train.py", "-t", "x"]


BAD = [
    (["submit", "nowhere.py"], "there is no file nowhere.py", "give a job file"),
    (["submit", "trian.py"], "did you mean train.py?", ""),
    (["submit"], "there is no job.yaml in this folder", "cloudtrain init"),
    (["submit", "."], "has no job.yaml", "cloudtrain init"),
    (["submit", "notes.txt"], "is not a job file", "cloudtrain init"),
    (["submit", "train.py", "-t", "nowhere"], "there is no target nowhere", "local"),
    (["submit", "train.py", "-t", "lokal"], "there is no target lokal", "did you mean local?"),
    (["submit", "train.py", "--set", "nothing"], "'nothing' is not a setting", "--set key=value"),
    (["submit", "train.py", "--set", "num_node=2"], "num_node", "num_nodes"),
    (["submit", "train.py", "--nodes", "two"], "num_nodes", ""),
    (["submit", "train.py", "--gpus", "A100:many"], "--gpus A100:many is not a type", ""),
    (["submit", "train.py", "--lr", "1"], "no such option", "cloudtrain submit train.py -- --lr"),
    (["submit", "--", "python train.py"], "has spaces in its name: 'python train.py'", "remove the quotes"),
    (["submit", "--", "LR=1", "python", "train.py"], "LR=1 is not a program", "--env LR=1"),
    (
        ["submit", "train.py", "--set", "gpus=A100:8"],
        "gpus: is not a known key",
        "did you mean resources.accelerators?",
    ),
    (sweep_file, "this is a sweep", "cloudtrain sweep FILE"),
    (batch_script, "is not a job file", "begins with #!"),
    (bucket_with_a_path("sagemaker", "s3://mine/runs"), "bucket: must be a name alone", "bucket: mine, prefix: runs"),
    (bucket_with_a_path("vertex", "mine/runs"), "bucket: must be a name alone", "bucket: mine, prefix: runs"),
    (host_as_text, "hosts: must hold tables", 'write {address = "10.0.0.6", user = "ml"}'),
    (mistyped_machine, "what GPUs ml.p4d.24xlage has", "did you mean ml.p4d.24xlarge?"),
    (["plan", "--", "train.py", "--lr", "1"], "train.py is a script", "submit train.py"),
    (["submit", "train.py", "--follow", "--wait"], "cannot be combined", "cloudtrain submit --help"),
    (["submit", "train.py", "--on-interrupt", "explode"], "explode", "cloudtrain submit --help"),
    (no_source, "source", ""),
    (no_entrypoint, "tran.py is not there; there is train.py", ""),
    (unknown_key, "job.yaml:2: num_node", "num_nodes"),
    (wrong_types, "2 problems", ""),
    (no_yaml, "not valid YAML", ""),
    (binary, "not UTF-8", ""),
    (broken_plan, "the file is not a plan", "cloudtrain plan job.yaml -o plan.json"),
    (old_plan, "version 99", "run cloudtrain plan again"),
    (a_fifo, "is not a file", ""),
    (credentials, "key.pem", ""),
    (no_toml, "cloudtrain.toml", ""),
    (newer_history, "newer cloudtrain", "CLOUDTRAIN_HOME"),
    (home_in_a_file, "", "CLOUDTRAIN_HOME"),
    (missing_extra, "needs the extra far, which is not installed", "pip install 'cloudtrain[far]'"),
    (["plan", "train.py", "-o", "/dev/full"], "no space left on device", "free some disk space"),
    (["plan", "train.py", "-o", "nowhere/plan.json"], "nowhere/plan.json", ""),
    (["show", "nothing"], "no run has the id or prefix 'nothing'", "cloudtrain ls"),
    (["logs"], "there are no runs yet", "cloudtrain submit"),
    (["cancel"], "name a run, or --key", "cloudtrain cancel --help"),
    (["cancel", "nothing"], "no run has", "cloudtrain ls"),
    (["resume", "nothing"], "no run has", "cloudtrain ls"),
    (["rerun", "nothing"], "no run has", "cloudtrain ls"),
    (["fetch"], "there are no runs yet", "cloudtrain submit"),
    (["fetch", "-o", "train.py"], "train.py is not a folder", "-o"),
    (["ls", "--state", "HAPPY"], "HAPPY", "cloudtrain ls --help"),
    (["ls", "-n", "0"], "0", "cloudtrain ls --help"),
    (["metrics", "--csv", "--json"], "cannot be combined", "cloudtrain metrics --help"),
    (["show", "--target", "x"], "--origin", "cloudtrain show --help"),
    (["doctor", "nowhere"], "nowhere", "local"),
    (["init", "nowhere.py"], "there is no script nowhere.py", ""),
    (["init", "-o", "nowhere/job.yaml"], "there is no folder nowhere", ""),
    (["plan", "nowhere", "--files"], "there is no file or folder nowhere", "give a folder"),
    (["init", "--schema", "-o", "nowhere/x.json"], "nowhere/x.json", ""),
]


def _name(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else getattr(value, "__name__", "")


@pytest.mark.parametrize(("words", "sentence", "hint"), BAD, ids=_name)
def test_bad_input_gets_a_sentence_a_hint_and_exit_2(cli, project, monkeypatch, words, sentence, hint):
    (project / "notes.txt").write_text("notes")
    monkeypatch.setitem(registry.BUILT_IN, "far", ("a_module_that_is_not_there:Backend", "far"))
    if callable(words):
        words = words(project)
    shown = cli(*words)
    assert shown.code == 2, shown
    assert shown.err.startswith("error: ")
    assert sentence in shown.err
    assert hint in shown.err
    assert "Traceback" not in shown.err and "internal error" not in shown.err
    assert shown.out == "" or "--json" in words
    assert not list(Path(os.environ["CLOUDTRAIN_HOME"]).glob("runs/*"))  # nothing was begun
    as_json = cli(*words, *(["--json"] if "--json" not in words and words[0] != "init" else []))
    assert as_json.code == 2
    if as_json.out:
        assert as_json.json["phase"] == "client"


def test_a_corrupt_history_is_moved_aside_and_said_once(cli, home):
    home.mkdir()
    (home / "history.sqlite3").write_bytes(b"no database " * 500)
    shown = cli("ls", "--json")
    assert (shown.code, shown.json) == (0, [])
    assert "warning: the history was damaged" in shown.err
    (aside,) = home.glob("history.sqlite3.corrupt-*")
    assert str(aside) in shown.err and aside.read_bytes().startswith(b"no database")
    assert cli("ls").err == ""


# -- the output -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["plan", "train.py"], ["ls", "--json"], ["show", "nothing", "--json"]])
def test_a_full_disk_behind_the_output(project, words, unbuffered):
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run([*CLI, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Exception ignored" not in done.stderr and "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_error(project):
    words = " ".join(f"'{word}'" for word in [sys.executable, "-m", "cloudtrain.cli", "init", "--schema"])
    script = f"{words} | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout in ("{141\n", "{0\n")  # 0 when the pipe took all of it first
    assert done.stderr == ""


def test_a_closed_output_is_no_error(project):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*CLI, "init", "--schema"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=WAIT_S)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("moment", ["no time", "2026-11-20T00:00:00", ""])
@pytest.mark.parametrize("words", [("ls",), ("rm", "--older", "30d", "--dry-run"), ("costs",)])
def test_one_run_with_a_damaged_time_does_not_hide_the_others(cli, home, words, moment):
    store = Store(home)
    for run_id in ("bad-261120-101500-ab3d", "good-261120-101501-ab3d"):
        add_run(store, run_id)
    with store.database.write() as db:
        for table in ("runs", "attempts"):
            where = f"UPDATE {table} SET created_at = ?, ended_at = ? WHERE run_id LIKE 'bad%'"
            db.execute(where, [moment] * 2)
    shown = cli(*words)
    assert shown.code == 0, shown.err
    if words == ("ls",):
        (line,) = (line for line in shown.out.splitlines() if line.startswith("tiny-lm-1"))
        assert "tiny-lm-2" in shown.out and ("?" in line.split()) == (moment == "no time")


@pytest.mark.parametrize("options", [["--wait"], []], ids=["wait", "no-wait"])
def test_a_submit_whose_id_cannot_be_stored_as_known_prints_one_object(cli, home, tmp_path, monkeypatch, options):
    refuse_writes(home, "acked_at")
    ended(monkeypatch)
    (tmp_path / "train.py").write_text("")
    said = cli("submit", tmp_path / "train.py", "-t", "memory", "--json", *options)
    assert said.code == 0, said
    assert said.json["run_id"].startswith("train-")
    assert "the disk is full" in said.err and "the next submit of the same job continues train-" in said.err


def test_an_error_behind_the_submission_names_the_run(cli, home, tmp_path, monkeypatch):
    refuse_writes(home, "ended_at")
    ended(monkeypatch)
    (tmp_path / "train.py").write_text("")
    said = cli("submit", tmp_path / "train.py", "-t", "memory", "--json", "--wait")
    assert said.code == 2
    assert said.json["run_id"].startswith("train-") and "the disk is full" in said.json["error"]


@pytest.mark.parametrize("ill", ["audit", "platform"])
def test_a_submit_that_stops_half_way_names_the_run_that_it_stored(cli, home, tmp_path, monkeypatch, ill):
    ended(monkeypatch)
    if ill == "audit":  # it is written between the intent and the platform's call
        (home / "audit.jsonl").mkdir(parents=True)
    else:
        monkeypatch.setattr(MemoryBackend, "submit", lambda *_: (_ for _ in ()).throw(BackendError("no quota")))
    (tmp_path / "train.py").write_text("")
    said = cli("submit", tmp_path / "train.py", "-t", "memory", "--json", "--wait")
    (run,) = Store(home).runs()
    assert said.code == (2 if ill == "audit" else 5) and said.json["run_id"] == run.run_id


def refuse_writes(home: Path, column: str) -> None:
    """Let SQLite refuse that a column of a run is set, as on a full disk."""
    with Store(home).database.write() as db:
        db.execute(
            f"CREATE TRIGGER full_disk BEFORE UPDATE OF {column} ON runs WHEN new.{column} IS NOT NULL"
            " BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
        )


def ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a platform whose jobs succeed at once."""
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))  # other tests in this process do not know it
    MemoryBackend.install()

    def submit(self, plan, bundle):
        handle = accept(self, plan, bundle)
        self.finish(handle)
        return handle

    accept = MemoryBackend.submit
    monkeypatch.setattr(MemoryBackend, "submit", submit)
    monkeypatch.setattr("cloudtrain.runs.sending.handover.start", lambda *args, **more: None)
