"""SSH transport and the agent behind it, against real sshd's on hosts of a lab."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.nodes import event_loop, ssh
from cloudtrain.nodes.agents import LocalAgent, call_all
from cloudtrain.nodes.rpc import RemoteAgent, remote_log_reader
from cloudtrain.nodes.ssh import Host
from cloudtrain.nodes.transfer import download_folder
from tests.conftest import wait_for
from tests.lab.connections import close_all


@pytest.fixture
def host(lab):
    yield Host(lab.hosts[0].address, user="root", identity=str(lab.key), known_hosts=str(lab.known_hosts))
    close_all()


@pytest.fixture
def there(host):
    return RemoteAgent(host, sys.executable)


def test_a_command(host):
    machine = ssh.connect(host)
    assert machine.run(["printf", "%s|", "a b", "$HOME", "it's", ""]).out == b"a b|$HOME|it's||"
    done = machine.run("cat; echo bad >&2; exit 3", given=b"\x00\xff" * 100_000)
    assert (done.code, done.out, done.err) == (3, b"\x00\xff" * 100_000, b"bad\n")
    assert machine.run("kill -9 $$").code == 137


def test_a_stream_and_its_early_end(lab, host):
    machine = ssh.connect(host)
    assert b"".join(machine.stream("cat", given=b"x" * 1_000_000)) == b"x" * 1_000_000
    lines = machine.stream("while echo line; do sleep 0.05; done")
    assert next(lines).startswith(b"line")
    lines.close()
    wait_for(lambda: not lab.hosts[0].processes(containing="sleep"), "the end of what was streamed")
    assert machine.run("echo still").out == b"still\n"


def test_a_command_that_takes_too_long(host):
    with pytest.raises(Unreachable, match="did not answer within 0.5 s"):
        ssh.connect(host).run("sleep 5", timeout_s=0.5)


def test_several_threads_and_hosts_at_once(lab, host):
    hosts = [replace(host, address=each.address) for each in lab.hosts]
    names = call_all(lambda each: ssh.connect(each).run("hostname").out.decode().strip(), hosts * 4)
    assert names == [each.name for each in lab.hosts] * 4
    nowhere = replace(host, port=2)
    found = call_all(lambda each: ssh.connect(each).run("hostname").code, [host, nowhere])
    assert found[0] == 0 and isinstance(found[1], Unreachable) and "Connection refused" in str(found[1])


def test_through_a_jump_host(lab, host):
    inner = replace(host, address=lab.hosts[1].address, jump=f"root@{lab.hosts[0].address}:22")
    seen = ssh.connect(inner).run("echo $SSH_CONNECTION; hostname").out.decode().split()
    assert seen[0] == lab.hosts[0].address and seen[-1] == lab.hosts[1].name


@pytest.mark.parametrize(
    ("jump", "address", "user", "port", "before"),
    [
        ("gate", "gate", None, None, None),
        ("me@gate:2222", "gate", "me", 2222, None),
        ("a@one,b@two:7", "two", "b", 7, "a@one"),
        ("me@[fe80::1]:22", "fe80::1", "me", 22, None),
        ("[fe80::1]", "fe80::1", None, None, None),
    ],
)
def test_jumps_are_written_as_ssh_has_them(jump, address, user, port, before):
    through = Host("inner", jump=jump, identity="key").jump_host
    assert through == Host(address, port, user, before, "key")


def test_keys(lab, host, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    with pytest.raises(BackendError, match="accepts none of your SSH keys") as caught:
        ssh.connect(replace(host, identity=str(tmp_path / "other")))
    assert not isinstance(caught.value, Unreachable) and "ssh-copy-id" in caught.value.hint


def test_host_keys(lab, host, tmp_path):
    known = tmp_path / "known"
    with pytest.raises(BackendError, match="is not in") as caught:
        ssh.connect(replace(host, known_hosts="/dev/null"))
    assert f"ssh-keyscan {host.address}" in caught.value.hint
    known.write_text(f"{host.address} {lab.hosts[1].host_key}\n")
    with pytest.raises(BackendError, match="the host key of .* differs from the one in") as caught:
        ssh.connect(replace(host, known_hosts=str(known)))
    assert "otherwise the connection may be intercepted" in caught.value.hint


def test_a_configuration_that_turns_the_check_off_is_refused(host, tmp_path, monkeypatch):
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host *\n  UserKnownHostsFile none\n  GlobalKnownHostsFile none\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(BackendError, match="turns off host key checking"):
        ssh.connect(replace(host, known_hosts=None))


def test_names_of_the_users_configuration(lab, host, tmp_path, monkeypatch):
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(
        f"Host trainer\n  HostName {host.address}\n  User root\n  IdentityFile {lab.key}\n"
        f"  UserKnownHostsFile {lab.known_hosts}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ssh.connect(Host("trainer")).run("hostname").out.decode().strip() == lab.hosts[0].name


def test_without_asyncssh_there_is_one_sentence(host):
    script = (
        "import sys; sys.modules['asyncssh'] = None\n"
        "from cloudtrain.nodes import ssh as remote\n"
        "from cloudtrain.errors import MissingExtra\n"
        "try: remote.connect(remote.Host('nowhere'))\n"
        "except MissingExtra as error: print(error, '|', error.hint)\n"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert shown.stdout == "SSH needs the extra ssh, which is not installed | pip install 'cloudtrain[ssh]'\n", (
        shown.stderr
    )


def test_a_cut_link_is_noticed_and_healed(lab, host, there):
    machine = ssh.connect(host)
    assert machine.unreachable_s == 0.0
    lab.hosts[0].cut()
    with pytest.raises(Unreachable):
        machine.run("true", timeout_s=3)
    assert machine.unreachable_s > 0.0
    lab.hosts[0].heal()

    def again():
        try:
            return there.ask("read", path="/etc/hostname") is not None
        except Unreachable:
            return False

    wait_for(again, "the connection")
    assert machine.unreachable_s == 0.0


# -- the agent --------------------------------------------------------------------------------------------------------


def test_the_same_operations_here_and_there(there, tmp_path):
    for place, folder in ((LocalAgent(), str(tmp_path / "x")), (there, "/root/x")):
        place.ask("write", b"\x00 bytes\n", path=f"{folder}/deep/file", mode=0o640)
        assert place.ask("read", path=f"{folder}/deep/file", offset=2, limit=3).data == b"byt"
        assert place.ask("read", path=f"{folder}/absent").data == b""
        ((name, size, _, mode, target),) = place.ask("walk", path=folder).value
        assert (name, size, mode, target) == ("deep/file", 8, 0o640, "")
        for junk in (b"\x1f\x8b junk", b"", gzip.compress(b"\0" * 1024)):  # damaged, empty, of another digest
            place.ask("put", junk, root=folder, sha256="0" * 64, offset=0, size=len(junk))
            with pytest.raises(BackendError, match="not the bundle"):
                place.ask("extract", root=folder, sha256="0" * 64, into=f"{folder}/into")
        assert place.ask("walk", path=f"{folder}/src").value == place.ask("walk", path=f"{folder}/into").value == []


def test_an_agent_that_ended_is_begun_again(lab, there):
    async def ask_as_it_closes() -> bytes:
        (session,) = [task.result() for task in (await there.remote.connection()).cloudtrain_sessions.values()]
        while not session._process.is_closing():
            await asyncio.sleep(0)
        closed.append(session.over)
        return (await there._ask(b'{"operation": "read", "arguments": {"path": "/etc/hostname"}, "size": 0}\n')).data

    closed: list[bool] = []
    assert there.ask("read", path="/etc/hostname").data
    for _ in range(5):
        asked = event_loop.begin(ask_as_it_closes())
        for pid in lab.hosts[0].processes(containing="exec(sys.stdin.buffer"):
            with suppress(ProcessLookupError):  # the one of the turn before may just have ended
                os.kill(pid, signal.SIGKILL)
        assert asked.result(60)
    assert not all(closed)  # at least once its channel was closed before its reader had heard of it


def test_a_python_that_is_not_there(host):
    with pytest.raises(BackendError, match="its Python does not start: .*/no/python") as caught:
        RemoteAgent(host, "/no/python").ask("facts", root="/root")
    assert not isinstance(caught.value, Unreachable)
    assert (
        RemoteAgent(host, sys.executable, ["X=' b'; export X", "echo noise"]).ask("facts", root="/root").value["python"]
    )


def test_many_questions_at_once(there):
    def ask(number: int) -> bytes:
        return there.ask("read", path=os.path.realpath(sys.executable), offset=number, limit=1000).data

    whole = Path(sys.executable).resolve().read_bytes()
    assert call_all(ask, range(200)) == [whole[number : number + 1000] for number in range(200)]


def test_a_folder_comes_back_and_what_is_here_is_not_read_again(lab, there, tmp_path):
    lab.hosts[0].run(["sh", "-c", "mkdir -p /root/b/deep; cd /root/b; head -c 9000000 /dev/urandom >deep/big; echo 1 >a; "
                      "chmod 700 a; ln -s deep/big link; ln -s /etc/passwd out; : >empty"])  # fmt: skip
    download_folder(there, "/root/b", tmp_path / "b")
    source = lab.hosts[0].path("/root/b")
    assert (tmp_path / "b/deep/big").read_bytes() == (source / "deep/big").read_bytes()
    assert (tmp_path / "b/a").stat().st_mode & 0o777 == 0o700 and (tmp_path / "b/empty").read_bytes() == b""
    assert (tmp_path / "b/link").readlink() == Path("deep/big") and not (tmp_path / "b/out").is_symlink()
    before = (tmp_path / "b/deep/big").stat().st_ino
    (source / "a").write_text("22")
    download_folder(there, "/root/b", tmp_path / "b")
    assert (tmp_path / "b/a").read_text() == "22" and (tmp_path / "b/deep/big").stat().st_ino == before


def test_logs_of_several_machines(lab, host):
    from cloudtrain.nodes import logs as node_logs

    for number, each in enumerate(lab.hosts):
        lines = "".join(f"{n} 0 2026-01-01T00:00:{n % 60:02d}.{number}Z text {n}\n" for n in range(60))
        each.path("/root/log").write_text(lines)
    logs = [(RemoteAgent(replace(host, address=each.address), sys.executable), "/root/log") for each in lab.hosts]
    missing: set[int] = set()
    found = list(node_logs.merge(remote_log_reader(logs, missing), 3))
    assert [line.at for line in found] == sorted(line.at for line in found) and len(found) == 180 and not missing
    for cut in (0, 90, 179):
        assert list(node_logs.merge(remote_log_reader(logs, missing), 3, after=found[cut].cursor)) == found[cut + 1 :]
    seen: list[str] = []
    over = threading.Event()

    def follow() -> None:
        after = found[-1].cursor
        seen.extend(
            x.text
            for x in node_logs.merge(remote_log_reader(logs, missing), 3, after=after, follow=True, ended=over.is_set)
        )

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    lab.hosts[1].cut()
    with lab.hosts[1].path("/root/log").open("a") as log:
        log.write("60 0 2026-01-01T00:01:00.0Z written while it was cut off\n")
    wait_for(lambda: missing == {1}, "the silence")
    lab.hosts[1].heal()
    wait_for(lambda: seen, "the line")
    over.set()
    reader.join(120)
    assert seen == ["written while it was cut off"]


def test_the_agent_runs_on_python_3_9():
    """What is sent holds nothing that 3.9 could not compile, and imports nothing but what is sent with it."""
    import ast

    import cloudtrain
    from cloudtrain.nodes.rpc import EMPTY_PACKAGES, SENT_MODULES

    for name in SENT_MODULES:
        tree = ast.parse(
            (Path(cloudtrain.__file__).parent / f"{name.replace('.', '/')}.py").read_text(), feature_version=(3, 9)
        )
        checks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
        for node in checks:
            node.body.clear()
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Match | ast.TryStar)]
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "strict"]
        roots = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                roots |= (
                    {f"{node.module}.{a.name}" for a in node.names} if node.module in EMPTY_PACKAGES else {node.module}
                )
        foreign = {root.split(".")[0] for root in roots} - sys.stdlib_module_names
        assert foreign <= {"cloudtrain", "isal"}, foreign  # isal is tried, zlib does where it is absent
        assert {root for root in roots if root.startswith("cloudtrain")} <= {
            f"cloudtrain.{sent}" for sent in SENT_MODULES
        }


def test_old_pythons_are_told_so(lab, host, tmp_path):
    lab.hosts[0].path("/root/python").write_text(
        f'#!/bin/sh\nexec {sys.executable} -c \'import sys; sys.version_info = (3, 8); sys.version = "3.8.1"; \'"$2"\n'
    )
    lab.hosts[0].run(["chmod", "755", "/root/python"])
    with pytest.raises(BackendError, match=r"Python 3.9 or newer is needed, this is 3\.8\.1"):
        RemoteAgent(host, "/root/python").ask("facts", root="/root")
