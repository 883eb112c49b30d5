"""The audit log: a line before each submit, cancel and rm, which nothing changes afterwards."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.cli import main
from cloudtrain.errors import BadJob, DiskError, NotReached
from cloudtrain.events import State
from cloudtrain.history import audit
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.steps import newest, watch
from tests.stores import GCS, S3, running


@pytest.fixture
def submitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submitter:
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    monkeypatch.setattr("cloudtrain.runs.sending.handover.start", lambda *_, **__: None)
    MemoryBackend.install()
    (tmp_path / "train.py").write_text("print(1)\n")
    return Submitter("memory", watch=False)


def job(tmp_path: Path, **more) -> dict:
    return {"name": "mine", "source": str(tmp_path), "entrypoint": "train.py", **more}


def test_a_run_is_named_as_ls_does(submitter: Submitter, tmp_path: Path, capsys):
    run = submitter.submit(job(tmp_path))
    assert main(["ls", "--json", "--columns", "short"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    short = row["short"]
    assert short != run.run_id and not run.run_id.startswith(short)
    assert main(["audit", short, "--json"]) == 0
    assert [row["run"] for row in json.loads(capsys.readouterr().out)] == [run.run_id]


def test_submits_retries_cancels_and_deletions_are_logged(submitter: Submitter, tmp_path: Path, home: Path, capsys):
    run = submitter.submit(job(tmp_path, retry={"max_attempts": 2}, env={"A": "hunter2"}, args=["--key", "hunter3"]))
    MemoryBackend.finish(newest(run), State.LOST, 1)
    watch(run)
    run.cancel()
    watch(run)
    assert main(["rm", run.run_id, "--yes"]) == 0
    capsys.readouterr()
    assert main(["audit", run.run_id[:6], "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["what"], row.get("attempt")) for row in rows] == [
        ("submit", 1),
        ("submit", 2),
        ("cancel", None),
        ("rm", None),
    ]
    assert rows[0]["target"] == rows[1]["target"] == "memory"
    assert {row["run"] for row in rows} == {run.run_id} and all(
        row["who"].endswith(f"@{socket.gethostname()}") for row in rows
    )
    text = (home / audit.FILE).read_text()
    assert "hunter" not in text and (home / audit.FILE).stat().st_mode & 0o077 == 0
    assert main(["audit"]) == 0
    assert "cancel" in capsys.readouterr().out
    assert main(["audit", "other"]) == 2 and "no run whose id begins with other" in capsys.readouterr().err


def test_tries_that_sent_nothing_do_not_look_like_submissions(
    submitter: Submitter, tmp_path: Path, home: Path, monkeypatch
):
    real, answers = MemoryBackend.submit, [NotReached("0 of 1 nodes can be reached") for _ in range(3)]

    def submit(*given):
        if answers:
            raise answers.pop()
        return real(*given)

    monkeypatch.setattr(MemoryBackend, "submit", submit)
    monkeypatch.setattr("cloudtrain.runs.sending.retry.OUTAGE_S", 0.0)
    run = submitter.submit(job(tmp_path, limits={"max_wait": "1h"}))
    for _ in range(3):
        watch(run)
    assert run.attempts[0].handle
    rows = [(row["what"], row.get("detail")) for row in audit.read(home, run.run_id)]
    assert rows == [("submit", None), *[("try again", "the tries before sent nothing")] * 3]


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path, home: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for address in (str(tmp_path / "runs"), "./runs", "runs"):
        assert main(["audit", address]) == 2
        said = capsys.readouterr()
        assert "runs has no audit log: it is not the folder of one run" in said.err and said.out == ""
    assert main(["audit"]) == 0 and "no such line" in capsys.readouterr().out


def test_the_time_and_the_columns_of_a_table(home: Path, capsys, monkeypatch):
    home.mkdir(parents=True)
    for moment, run in (("2026-11-01T10:00:00.000000Z", "old-1"), ("2026-11-20T10:00:00.000000Z", "new-1")):
        monkeypatch.setattr(audit, "now", lambda moment=moment: moment)
        audit.append(home, "submit", run, attempt=1, target="memory")
    assert main(["audit", "--since", "2026-11-02"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["at", "who", "what", "run", "attempt", "target"], "detail is empty in all lines"
    assert len(printed) == 2 and "new-1" in printed[1]
    assert main(["audit", "--since", "2026-11-01", "--until", "2026-11-20"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and "old-1" in printed[1], "the day of --until is not part of it"
    audit.append(home, "cancel", "old-1", detail="by hand")
    assert main(["audit", "--since", "2026-10-01", "--json"]) == 0
    assert [row["run"] for row in json.loads(capsys.readouterr().out)] == ["old-1", "new-1", "old-1"]
    assert main(["audit", "old"]) == 0 and "detail" in capsys.readouterr().out.splitlines()[0]
    assert main(["audit", "--since", "yesterday"]) == 2 and "--since" in capsys.readouterr().err


def test_an_exec_is_logged_without_its_command(submitter: Submitter, tmp_path: Path, home: Path):
    from cloudtrain.runs.inside import Inside

    run = submitter.submit(job(tmp_path))
    Inside(run, run.attempts[-1], None).record("exec", command=["cat", "hunter2"], on=1)  # type: ignore[arg-type]
    row = list(audit.read(home, run.run_id))[-1]
    assert (row["what"], row["attempt"], row["target"], row["detail"]) == ("exec", 1, "memory", "node 1")
    assert "hunter2" not in (home / audit.FILE).read_text()


def test_the_line_is_there_before_the_platform_is_asked(submitter: Submitter, tmp_path: Path, home: Path, monkeypatch):
    seen = []
    real = MemoryBackend.submit
    monkeypatch.setattr(MemoryBackend, "submit", lambda *given: (seen.extend(audit.read(home)), real(*given))[1])
    submitter.submit(job(tmp_path))
    assert [row["what"] for row in seen] == ["submit"]


def test_what_cannot_be_logged_is_not_sent(submitter: Submitter, tmp_path: Path, home: Path):
    home.mkdir(parents=True, exist_ok=True)
    (home / audit.FILE).mkdir()
    with pytest.raises(DiskError, match=r"audit\.jsonl cannot be written"):
        submitter.submit(job(tmp_path))
    assert not MemoryBackend.attempts


def test_lines_are_only_appended_and_a_torn_one_is_left_out(home: Path):
    home.mkdir(parents=True)
    audit.append(home, "submit", "a-1", attempt=1)
    before = (home / audit.FILE).read_bytes()
    with open(home / audit.FILE, "ab") as file:
        file.write(b'{"at": "2026\n[1]\n')
    audit.append(home, "cancel", "a-1")
    assert (home / audit.FILE).read_bytes().startswith(before)
    assert [row["what"] for row in audit.read(home)] == ["submit", "cancel"]
    if os.getuid():
        assert oct((home / audit.FILE).stat().st_mode)[-3:] == "600"


@pytest.mark.parametrize("kind", [None, S3, GCS])
def test_the_lines_are_in_the_output_too_each_in_a_file_of_its_own(
    kind, submitter: Submitter, tmp_path: Path, home: Path, monkeypatch, capsys
):
    from cloudtrain.runs.inside import Inside

    def check(output: str, objects) -> None:
        run = submitter.submit(
            job(tmp_path, output=output, audit=True, env={"A": "hunter2"}, args=["--key", "hunter3"])
        )
        before = objects()
        Inside(run, run.attempts[-1], None).record("exec", command=["cat", "hunter4"], on=1)  # type: ignore[arg-type]
        run.cancel()
        watch(run)
        assert main(["rm", run.run_id, "--yes"]) == 0
        there = {name: data for name, data in objects().items() if "/audit/" in name}
        assert len(there) == 4 and before.items() <= there.items(), "nothing is written over"
        assert all(data.count(b"\n") == 1 and b"hunter" not in data for data in there.values())
        own = list(audit.read(home, run.run_id))
        capsys.readouterr()
        assert main(["audit", f"{output}/{run.run_id}", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [row["what"] for row in rows] == ["submit", "exec", "cancel", "rm"]
        assert rows == [{name: str(value) for name, value in row.items()} for row in own]

    if kind is None:
        folder = tmp_path / "runs"
        check(str(folder), lambda: {str(path): path.read_bytes() for path in folder.rglob("*.json")})
        return
    with running(kind) as store:
        for name, value in store.environ.items():
            monkeypatch.setenv(name, value)
        check(f"{store.scheme}://bucket/runs", store.objects)


def test_a_store_that_refuses_delays_no_submit_and_is_named(
    submitter: Submitter, tmp_path: Path, home: Path, monkeypatch
):
    with running(S3) as store:
        for name, value in store.environ.items():
            monkeypatch.setenv(name, value)
        store.refuse = "runs/"
        run = submitter.submit(job(tmp_path, output="s3://bucket/runs", audit=True))
        assert MemoryBackend.attempts and not run.record.status.state.final
        rows = [(row["what"], row.get("detail", "")) for row in audit.read(home, run.run_id)]
        assert rows[0] == ("submit", "") and rows[1][0] == "not copied" and "AWS denies s3:PutObject" in str(rows[1][1])
        store.refuse = ""
        store.hold.clear()
        monkeypatch.setattr(audit, "WAIT_S", 0.1)
        submitter.submit(job(tmp_path, output="s3://bucket/runs", audit=True, args=["x"]))
        assert "no answer for 0.1 s" in str(list(audit.read(home))[-1]["detail"])
        store.hold.set()


def test_what_others_wrote_into_an_output_is_bounded(tmp_path: Path):
    folder = tmp_path / "run" / "audit"
    folder.mkdir(parents=True)
    row = {"at": "2026", "who": "eve\x1b[31m@host", "what": "submit", "run": "r" * 9000, "more": "x"}
    for number, text in enumerate([json.dumps(row)[:4000], json.dumps({**row, "run": "r"}), "[1]", "{"]):
        (folder / f"20261125T101500.000000Z-submit-0000000{number}.json").write_text(text)
    (folder / "other.json").write_text("{}")
    assert audit.read_output(str(tmp_path / "run")) == [{"at": "2026", "who": "eve@host", "what": "submit", "run": "r"}]


def test_audit_needs_an_output_that_this_machine_reaches(tmp_path: Path, home: Path, monkeypatch):
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadJob, match="needs a folder or bucket to write to"):
        Submitter("local", watch=False).plan(job(tmp_path, audit=True))
    (tmp_path / "cloudtrain.toml").write_text(
        '[targets.pair]\nbackend = "ssh"\nhosts = [{address = "10.0.0.5"}, {address = "10.0.0.6"}]\n'
    )
    with pytest.raises(BadJob, match="is on the machines of pair"):
        Submitter("pair", watch=False).plan(job(tmp_path, audit=True, output="/shared/runs"))


def test_who_submits_to_sagemaker_may_write_these_lines(tmp_path: Path):
    from cloudtrain.backends.sagemaker.backend import SagemakerBackend
    from cloudtrain.job.job import Job
    from cloudtrain.runs.planning.plan import Planner

    (tmp_path / "train.py").write_text("print(1)\n")
    options = {"role": "arn:aws:iam::123456789012:role/r", "bucket": "acme", "region": "us-east-1", "image": "i"}
    for given, wanted in ((False, []), (True, ["arn:aws:s3:::team/runs/*/audit/*"])):
        made = Job.from_dict(job(tmp_path, audit=given, output="s3://team/runs", environment={"requirements": "none"}))
        policy = SagemakerBackend(options, tmp_path).policy("submit", Planner("sagemaker", **options).plan(made))
        assert [each["Resource"] for each in policy["Statement"] if each["Sid"] == "Audit"] == (
            [wanted] if wanted else []
        )
