"""Configurations of OpenSSH as people have them: what `ssh -G` says holds for us too, and a real sshd lets us in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.nodes import ssh, ssh_config
from cloudtrain.nodes.rpc import RemoteAgent
from cloudtrain.nodes.ssh import Host, Remote
from tests.conftest import require
from tests.lab.connections import close_all
from tests.lab.network import Lab

CASES = {
    "plain": "Host box\n  HostName 10.9.9.9\n  User ml\n  Port 2222\n",
    "two files": "Host box\n  UserKnownHostsFile {home}/absent {home}/known\n",
    "/dev/null": "Host *\n  UserKnownHostsFile /dev/null\n  StrictHostKeyChecking no\n",
    "include": "Include {home}/more\nHost box\n  Port 9\n",
    "match": "Match originalhost box user ml\n  HostName matched\nMatch exec \"test -e {home}/known\"\n  Port 77\n",
    "control": "Host *\n  ControlMaster auto\n  ControlPath {home}/%r@%h:%p\n  ControlPersist 10m\n",
    "alias": "Host box\n  HostKeyAlias cluster\n  IdentityFile {home}/key\n  IdentitiesOnly yes\n",
    "jump": "Host box\n  ProxyJump me@gate:2200\nHost gate\n  User other\n",
    "proxy": "Host box\n  ProxyCommand nc -x %r %h %p %%\n  IdentityAgent none\n",
}  # fmt: skip


@pytest.fixture
def user_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    require("ssh")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir(mode=0o700)
    return tmp_path


def configure(home: Path, text: str) -> None:
    (home / ".ssh" / "config").write_text(text.format(home=home))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("user", [None, "ml"])
def test_our_connection_has_what_ssh_prints(user_home: Path, case: str, user: str | None):
    (user_home / "known").write_text("")
    (user_home / "more").write_text("Host box\n  HostName included\n")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(user_home / "key")], check=True)
    configure(user_home, CASES[case])
    config = user_home / ".ssh" / "config"
    argv = ["ssh", "-F", str(config), *(("-l", user) if user else ()), "-G", "box"]
    printed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()

    def values(name: str) -> list[str]:
        return [line.partition(" ")[2] for line in printed if line.partition(" ")[0] == name]

    made = ssh_config.read("box", None, user, None)
    assert made is not None
    options = made.options()
    assert [options["host"]] == values("hostname") and [options["username"]] == values("user")
    assert [str(options["port"])] == values("port")
    assert values("proxyjump") == ([made.jump] if made.jump else [])
    assert values("hostkeyalias") == ([options["host_key_alias"]] if "host_key_alias" in options else [])
    keys = [Path(name).expanduser() for name in values("identityfile")]
    assert list(options["client_keys"]) == [str(path) for path in keys if path.exists()]
    assert ("agent_identities" in options) == (values("identitiesonly") == ["yes"])
    if values("stricthostkeychecking") == ["false"]:
        assert options["known_hosts"] is None
    else:
        known = " ".join(values("userknownhostsfile") + values("globalknownhostsfile")).split()
        existing = [name for name in known if Path(name).is_file()]
        assert (options["known_hosts"] or b"\n") == (existing or b"\n")
    if case == "proxy":
        assert options["proxy_command"][-1] == f"exec nc -x {options['username']} box 22 %"
        assert options["agent_path"] is None


def test_a_configuration_that_ssh_does_not_understand(user_home: Path):
    configure(user_home, "Host box\n  NoSuchKeyword 1\n")
    with pytest.raises(BackendError, match="box: ssh does not read its configuration"):
        ssh_config.read("box", None, None, None)


@pytest.fixture
def reach(lab: Lab, user_home: Path):
    """Return a function that configures the host box and connects to the first host of the lab under that name."""

    def reach(text: str, **options: str) -> Remote:
        base = f"Host box\n  HostName {lab.hosts[0].address}\n  User root\n  IdentityFile {lab.key}\n"
        configure(user_home, base + text)
        return ssh.connect(Host("box", **options))

    yield reach
    close_all()


def hostname(remote: Remote) -> str:
    return remote.run("hostname").out.decode().strip()


@pytest.mark.parametrize(
    "text",
    [
        "  UserKnownHostsFile {home}/absent {known}\n",
        "  UserKnownHostsFile /dev/null\n  StrictHostKeyChecking no\n",
        "  UserKnownHostsFile {home}/learnt\n  StrictHostKeyChecking accept-new\n",
        "  UserKnownHostsFile {known}\n  ControlMaster auto\n  ControlPath {home}/%r@%h:%p\n",
        "Match originalhost box exec true\n  UserKnownHostsFile {known}\n",
        "Include {home}/more\n",
    ],
)
def test_a_host_of_an_ordinary_configuration_is_reached(lab: Lab, reach, user_home: Path, text: str):
    (user_home / "more").write_text(f"UserKnownHostsFile {lab.known_hosts}\n")
    (user_home / "learnt").touch()
    assert hostname(reach(text.replace("{known}", str(lab.known_hosts)))) == lab.hosts[0].name
    if "accept-new" in text:
        assert lab.hosts[0].host_key.split()[1] in (user_home / "learnt").read_text()


def test_only_another_key_is_said_to_differ(lab: Lab, reach, user_home: Path):
    with pytest.raises(BackendError, match="host key of .* is not in") as caught:
        reach("  UserKnownHostsFile /dev/null\n")
    assert "may be intercepted" not in str(caught.value.hint) and ">> /dev/null" not in str(caught.value.hint)
    close_all()
    (user_home / "wrong").write_text(f"{lab.hosts[0].address} {lab.hosts[1].host_key}\n")
    for checking in ("ask", "accept-new"):
        with pytest.raises(BackendError, match="the host key of .* differs from the one in") as caught:
            reach(f"  UserKnownHostsFile {{home}}/wrong\n  StrictHostKeyChecking {checking}\n")
        assert "may be intercepted" in str(caught.value.hint)
        close_all()


def test_a_key_with_a_passphrase_needs_an_agent_that_has_it(lab: Lab, user_home: Path, monkeypatch: pytest.MonkeyPatch):
    key = user_home / "locked"
    key.write_bytes(Path(lab.key).read_bytes())
    key.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(key)], check=True)
    configure(user_home, f"Host box\n  HostName {lab.hosts[0].address}\n  User root\n  IdentityFile {key}\n"
                         f"  UserKnownHostsFile {lab.known_hosts}\n")  # fmt: skip
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with pytest.raises(BackendError, match="accepts none of your SSH keys") as caught:
        ssh.connect(Host("box"))
    assert not isinstance(caught.value, Unreachable) and f"{key} has a passphrase: ssh-add {key}" in caught.value.hint
    close_all()
    started = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
    socket, pid = (started.split(f"{name}=")[1].split(";")[0] for name in ("SSH_AUTH_SOCK", "SSH_AGENT_PID"))
    monkeypatch.setenv("SSH_AUTH_SOCK", socket)
    try:
        subprocess.run(["ssh-add", "-q", str(lab.key)], check=True, env=dict(os.environ))
        assert hostname(ssh.connect(Host("box"))) == lab.hosts[0].name
    finally:
        close_all()
        os.kill(int(pid), signal.SIGTERM)


def test_what_a_bashrc_prints_is_no_answer(lab: Lab, reach):
    machine = lab.hosts[0]
    machine.run(["sh", "-c", "printf 'echo hello\\necho ready\\nprintf half' > /root/.bashrc"])
    try:
        remote = reach(f"  UserKnownHostsFile {lab.known_hosts}\n")
        assert remote.run("true").out.startswith(b"hello\n"), "this sshd's bash reads it"
        facts = RemoteAgent(replace(remote.host), sys.executable).ask("facts", root="/root/x").value
        assert facts["hostname"] == machine.name
    finally:
        machine.path("/root/.bashrc").unlink()
