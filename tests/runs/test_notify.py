"""Notifications: said once, tried again, in nobody's way, and with no secret in them."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path

import pytest

from cloudtrain import events
from cloudtrain.errors import BadJob
from cloudtrain.events import State, Status
from cloudtrain.history.store import Store
from cloudtrain.report import notify
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.conftest import WAIT_S, wait_for
from tests.runs.steps import watch

TOKEN = "hf_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3z"  # noqa: S105 - of the right form, and nobody's


@pytest.fixture
def receiver():
    """A webhook on loopback that refuses the first message; (address, what it was sent)."""
    heard: list[dict] = []
    answers = [500, 200, 200, 200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers[min(len(heard), len(answers)) - 1])
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", heard
    server.shutdown()


@pytest.mark.parametrize(
    ("state", "final", "event"),
    [
        (State.SUCCEEDED, True, "end"), (State.CANCELLED, True, "end"), (State.FAILED, True, "failure"),
        (State.LOST, True, "failure"), (State.LOST, False, "preemption"), (State.PREEMPTED, False, "preemption"),
        (State.RUNNING, False, None),
    ],
)  # fmt: skip
def test_what_there_is_to_say(state, final, event):
    assert notify.event_of(Status(state), final=final) == event


@pytest.mark.parametrize(
    ("event", "data"),
    [
        ("idle", {"idle": True, "reason": "the GPUs were used less than 5 % for 30 minutes"}),
        ("straggler", {"straggler": 0, "reason": "straggler: node 0 (gpu-7): 0.55 s per step, 27 % slower"}),
    ],
)
def test_an_alarm_is_told_once(memory, submitter, job, home, monkeypatch, event, data):
    folder = Path(job.source)
    (folder / "cloudtrain.toml").write_text('[notify]\ncommand = "true"\n')
    monkeypatch.chdir(folder)
    started: list[list[str]] = []
    monkeypatch.setattr(notify, "detach", lambda command, **_: started.append(command))
    run = submitter.submit(job)
    alarm = events.format("alarm", data)
    for _ in range(2):
        MemoryBackend.say(f"{run.run_id}-a1", alarm)
        watch(run)
    assert [command[-1] for command in started] == [event]
    told = notify.message(run.store, run.run_id, f"{run.run_id}-a1", event)
    assert told["text"].endswith(f"RUNNING: {data['reason']}")


def test_a_run_that_ends_is_told_once_and_without_secrets(tmp_path, home, receiver, monkeypatch, census):
    address, heard = receiver
    monkeypatch.setenv("MY_TOKEN", "open sesame")
    monkeypatch.setenv("MY_HOOK", address)
    monkeypatch.setattr(notify, "PAUSES_S", (0.0,))
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("raise SystemExit(3)\n")
    (project / "job.yaml").write_text("entrypoint: train.py\nname: told\nsecrets: {MY_TOKEN: env:MY_TOKEN}\n")
    out = tmp_path / "said"
    (project / "cloudtrain.toml").write_text(
        f'[notify]\non = ["failure"]\nwebhook = "env:MY_HOOK"\n'
        f"command = 'env > {out}.env; cat > {out}.half; mv {out}.half {out}'\n"
    )
    run = Submitter().submit(project / "job.yaml")
    assert run.wait(WAIT_S).exit_code == 3
    wait_for(out.exists, "the command")
    told = json.loads(out.read_text())
    assert (told["event"], told["run_id"], told["state"], told["exit_code"]) == ("failure", run.run_id, "FAILED", 3)
    environ = Path(f"{out}.env").read_text()
    assert f"CLOUDTRAIN_RUN_ID={run.run_id}\n" in environ and "CLOUDTRAIN_STATE=FAILED\n" in environ
    assert "open sesame" not in environ and "MY_TOKEN" not in environ
    wait_for(lambda: len(heard) >= 2, "the webhook, tried again")  # the first was refused
    assert heard[0] == heard[1] == told
    stored = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    assert address.encode() not in stored and b"open sesame" not in stored
    assert not Store(home).claim_notice(f"{run.run_id}-a1", "failure"), "another watcher would not say it again"


def test_each_way_is_tried_again_and_its_failure_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(notify, "PAUSES_S", (0.0, 0.0, 0.0))
    count = tmp_path / "count"
    data = {"event": "end", "text": "x"}
    problems = notify.send({"command": f"echo x >> {count}; exit 4", "webhook": f"http://127.0.0.1:9/{TOKEN}"}, data)
    assert count.read_text() == "x\n" * 3
    assert problems[0] == "the command failed 3 times: it ended with 4"
    assert problems[1].startswith("the webhook failed 3 times: ") and TOKEN not in problems[1]
    assert notify.send({"on": ["failure"], "command": f"echo y >> {count}"}, data) == []
    assert "y" not in count.read_text()
    assert notify.send({"webhook": "env:NOT_THERE"}, data) == ["the webhook failed 3 times: no http address is set"]


def test_an_address_that_is_kept_in_a_variable_is_not_sent_unencrypted(monkeypatch):
    monkeypatch.setattr(notify, "PAUSES_S", (0.0,))
    monkeypatch.setenv("HOOK", f"http://hooks.example/{TOKEN}")
    (problem,) = notify.send({"webhook": "env:HOOK"}, {"event": "end"})
    assert "write https://" in problem and TOKEN not in problem


def test_what_a_message_shows_has_no_direction_marks(memory, submitter, job):
    run = submitter.submit(job)
    MemoryBackend.finish(f"{run.run_id}-a1", State.FAILED, 1, "exit \u202egnp\u200b")
    watch(run)
    told = notify.message(run.store, run.run_id, f"{run.run_id}-a1", "end")
    assert "exit \\u202egnp\\u200b" in told["text"] and told["reason"] == "exit \\u202egnp\\u200b"


def test_a_way_that_fails_holds_up_no_other(receiver, monkeypatch, tmp_path):
    address, heard = receiver
    monkeypatch.setattr(notify, "PAUSES_S", (0.0, 0.0))  # the receiver refuses what it hears first
    heard_of = tmp_path / "heard of"
    monkeypatch.setattr(notify, "TIMEOUT_S", WAIT_S)
    fails = f"while ! test -e '{heard_of}'; do sleep 0.05; done; exit 4"  # until the other one has succeeded
    sender = threading.Thread(
        target=lambda: problems.extend(notify.send({"command": fails, "webhook": address}, {"event": "end"})),
        daemon=True,
    )
    problems: list[str] = []
    sender.start()
    wait_for(lambda: len(heard) == 2, "the webhook, beside a command that does not end")
    heard_of.touch()
    sender.join(WAIT_S)
    assert problems == ["the command failed 2 times: it ended with 4"]


def test_a_reason_that_holds_a_credential_is_left_out(home, tmp_path, census):
    (tmp_path / "train.py").write_text("print(1)\n")
    run = Submitter("local", watch=False).submit({"source": str(tmp_path), "entrypoint": "train.py", "name": "x"})
    run.cancel(60)
    found = run.store.record
    with run.store.database.write() as db:
        db.execute("UPDATE runs SET reason = ?", (f"could not log in with {TOKEN}",))
    assert found
    told = notify.message(run.store, run.run_id, f"{run.run_id}-a1", "end")
    assert TOKEN not in json.dumps(told) and told["text"] == f"{run.run_id} CANCELLED"


def test_any_way_to_write_the_table_asks_for_it(home, tmp_path, monkeypatch, census):
    file = tmp_path / "cloudtrain.toml"
    file.touch()
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    run = Submitter("local", watch=False).submit({"source": str(tmp_path), "entrypoint": "train.py"})
    run.cancel(60)
    started: list[list[str]] = []
    monkeypatch.setattr(notify, "detach", lambda command, **_: started.append(command))

    def asks(number: int) -> bool:
        notify.start(run.store, run.run_id, f"{run.run_id}-a{number}", "end")
        return len(started) > number

    asking = (
        "[notify]\ncommand = 'x'", "[ notify ]\ncommand = 'x'", "notify.command = 'x'", "notify = {command = 'x'}",
        "['notify']\ncommand = 'x'", "[notify]\ncommand = x", "[notify]\nwebhok = 'x'", "[notify]\ncommand = '\xe9'",
    )  # fmt: skip
    for number, text in enumerate(asking):
        file.write_text(text, "latin-1")  # the last ones are wrong, which notify.log is to say
        assert asks(number), text
    for text in ("[defaults]\nname = 'notify'", "# [notify]", "[notify]", ""):
        file.write_text(text)
        assert not asks(len(asking)), text


def test_a_wrong_table_is_one_sentence(tmp_path):
    (tmp_path / "cloudtrain.toml").write_text('[notify]\nwebhok = "x"\n')
    with pytest.raises(BadJob, match=r"notify.webhok"):
        notify.settings([tmp_path / "cloudtrain.toml"])
