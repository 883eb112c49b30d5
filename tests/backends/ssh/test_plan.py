"""What the backend ssh plans and refuses; nothing is reached for it."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import ValidationError

from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.backends.ssh.machines import make_handle
from cloudtrain.errors import BadJob
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle

GOLDEN = Path(__file__).parents[2] / "golden" / "ssh" / "two_nodes.json"
HOSTS = [{"address": "10.0.0.5"}, {"address": "gate", "user": "root", "port": 2222, "internal": "10.0.0.6"}]


@pytest.fixture
def plan(tmp_path: Path):
    """Return a function: options, changes to the job -> plan."""

    def plan(options: dict, **changes):
        source = tmp_path / "source"
        source.mkdir(exist_ok=True)
        (source / "train.py").write_text("print(1)\n")
        job = Job.from_dict({"name": "golden", "source": str(source), "entrypoint": "train.py", **changes})
        return SshBackend(options, tmp_path / "runs").plan(job, Bundle.make(source, tmp_path / "bundles"), "golden-run")

    return plan


def test_golden_plan(plan, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("plan() reached for the network")

    monkeypatch.setattr(socket, "socket", forbidden)
    monkeypatch.setitem(sys.modules, "asyncssh", None)  # law 1: no SDK either
    options = {
        "hosts": HOSTS,
        "user": "ml",
        "python": "/opt/venv/bin/python",
        "setup": ["module load cuda/12.4"],
        "jump": "me@gateway",
        "lease": "client",
    }
    made = plan(options, num_nodes=2, processes_per_node=8, env={"A": "b"}, resources={"accelerators": "A100-80GB:8"})
    request = json.loads(json.dumps(made.request))
    request["env"] = {
        name: "${manifest}" if name.startswith("CLOUDTRAIN_MANIFEST_") else text
        for name, text in request["env"].items()
    }
    request["source"] = request["source"].replace(made.bundle["sha256"], "${bundle.sha256}")
    text = json.dumps({"request": request, "manifest": made.manifest, "notes": made.notes}, indent=2) + "\n"
    if os.environ.get("CLOUDTRAIN_WRITE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"parallelism": {"strategy": "fsdp"}}, "parallelism.strategy"),
        ({"parallelism": {"strategy": "hsdp"}}, "parallelism.strategy"),
        ({"parallelism": {"strategy": "zero1"}}, "parallelism.strategy"),
        ({"processes_per_node": 2, "parallelism": {"strategy": "ddp", "tp_size": 2}}, "parallelism"),
        ({"num_nodes": 3}, "num_nodes"),
        ({"output": "https://host/x"}, "output"),
        ({"inputs": {"x": {"uri": "s3://bucket/x", "mode": "mount"}}}, "inputs.x.mode"),
    ],
)
def test_jobs_that_these_machines_cannot_do(plan, changes, path):
    with pytest.raises(BadJob) as caught:
        plan({"hosts": HOSTS}, **{"num_nodes": 2, **changes})
    assert [problem.path for problem in caught.value.problems] == [path]


def test_sharded_is_fine_on_one_node_and_with_an_output(plan):
    fsdp = {"parallelism": {"strategy": "fsdp"}, "processes_per_node": 2}
    assert plan({"hosts": HOSTS}, **fsdp).request["nodes"] == 1
    made = plan({"hosts": HOSTS}, num_nodes=2, output="/nfs/out", **fsdp)
    assert made.request["env"]["CLOUDTRAIN_RUN_DIR"] == "/nfs/out/golden-run"
    assert plan({"hosts": HOSTS}, num_nodes=2, output="s3://bucket/x", **fsdp).manifest["output"] == "s3://bucket/x"


def test_without_a_machine_there_is_no_plan(plan):
    with pytest.raises(BadJob, match="no machines are set"):
        plan({})


@pytest.mark.parametrize(
    "wrong",
    [
        {"hosts": [{"address": ""}]},
        {"hosts": [{}]},
        {"hosts": [{"address": "a"}, {"address": "a"}]},
        {"port": 0},
        {"directory": "relative"},
        {"lease": "nobody"},
        {"hosts": [{"address": "a", "password": "x"}]},
    ],
)
def test_options_that_are_refused(wrong):
    with pytest.raises(ValidationError):
        SshBackend.options().model_validate(wrong)


def test_one_machine_under_two_ports_is_two():
    SshBackend.options().model_validate({"hosts": [{"address": "a"}, {"address": "a", "port": 23}]})


def test_hosts_of_the_users_configuration_are_offered(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SshBackend.discover() == {}
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host one two\n  User me\nHost *.lab !bad\nhost one three-3\nMatch all\n")
    assert SshBackend.discover() == {"hosts": [{"address": "one"}, {"address": "two"}, {"address": "three-3"}]}


def test_a_handle_of_other_machines_is_lost(tmp_path):
    backend = SshBackend({"hosts": HOSTS}, tmp_path)
    for handle in ("", "nonsense", "elsewhere:~/.cloudtrain/runs/x/a1", "10.0.0.5"):
        assert backend.status(handle).state.value == "LOST"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("jump", [None, "me@gateway:2200", "me@outer,gateway"])
def test_a_program_inside_is_reached_where_the_host_key_is_known_only(tmp_path: Path, terminal: bool, jump: str | None):
    """`exec`, `stack` and `forward` use the ssh client: of the machine and of each jump host the key must be known."""
    known = tmp_path / "known hosts"
    backend = SshBackend({"hosts": HOSTS[:1], "known_hosts": str(known), **({"jump": jump} if jump else {})}, tmp_path)
    argv = backend.shell(
        make_handle([backend.machines[0].label], "/runs/r/a1"), 0, ["-c", "pass"], stdin=terminal, terminal=terminal
    ).argv
    for _ in range((jump or "").count(",") + bool(jump) + 1):
        options = [value for flag, value in pairwise(argv) if flag == "-o"]
        settings = dict(option.partition("=")[::2] for option in options)
        assert settings["StrictHostKeyChecking"] == "yes" and settings["GlobalKnownHostsFile"] == "none"
        assert settings["UserKnownHostsFile"] == f'"{known}"'
        argv = shlex.split(settings.get("ProxyCommand", "").replace("%%", "%"))
    assert not argv
