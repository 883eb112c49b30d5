"""An organisation's policy: doctor fetches and pins it, plan reads the copy without a network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cloudtrain.errors import BadRequest, CloudtrainError
from cloudtrain.policy import pin
from cloudtrain.policy.checks import Refused
from cloudtrain.policy.files import BadPolicy
from cloudtrain.runs.planning.plan import Planner

RULES = '[rules.team]\nlabels = {team = "*"}\n'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "rules"
    folder.mkdir()
    (folder / "policy.toml").write_text(RULES)
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "rules", "--allow-empty"]):
        subprocess.run(["git", *words], cwd=folder, check=True, timeout=60)


def configure(project: Path, url: str, more: str = "") -> None:
    (project / "cloudtrain.toml").write_text(f'[policy]\nfrom = "{url}"\n{more}')


def test_doctor_pins_it_and_plan_shows_age_and_digest(project: Path, repository: Path, home: Path, cli):
    url = f"git+file://{repository}"
    configure(project, url)
    code, _, err = cli("plan", "-t", "local")
    assert code == 2 and "is not pinned here" in err and "cloudtrain doctor" in err
    code, out, _ = cli("doctor", "local")
    assert code == 0 and "1 rule, sha256" in out, out
    with pytest.raises(Refused, match="rule team"):
        Planner("local").plan("job.yaml")
    repository.rename(repository.with_name("moved"))  # plan reads the copy
    digest = hashlib.sha256(RULES.encode()).hexdigest()
    _, out, _ = cli("plan", "-t", "local", "--set", "labels.team=x")
    assert f"{url} (1 rule, sha256 {digest[:12]}, pinned today)" in out
    about = next(home.glob("policies/*/pin.json"))
    data = json.loads(about.read_text())
    assert len(data["commit"]) == 40
    about.write_text(json.dumps({**data, "as_of": "2026-01-01T00:00:00+00:00"}))
    assert (
        "days ago, old: cloudtrain doctor fetches it again" in cli("plan", "-t", "local", "--set", "labels.team=x")[1]
    )
    assert cli("doctor", "local")[0] == 1, "what cannot be fetched is a problem"
    assert json.loads(about.read_text())["as_of"].startswith("2026-01"), "the copy stays"


def test_doctor_looks_at_the_names_of_a_policy_that_it_fetches(project: Path, repository: Path, cli):
    (repository / "policy.toml").write_text(RULES + 'on = ["locl"]\n')
    commit(repository)
    configure(project, f"git+file://{repository}")
    code, out, err = cli("doctor", "local")
    assert code == 1 and '"locl" matches no target or backend' in out + err


def test_a_copy_that_was_edited_is_refused(project: Path, repository: Path, home: Path):
    url = f"git+file://{repository}"
    configure(project, url)
    found = pin.pin(url, home)
    Path(found.file).chmod(0o600)
    Path(found.file).write_text(RULES.replace("team", "nothing"))
    with pytest.raises(BadPolicy, match="is not the policy that was pinned"):
        Planner("local").plan("job.yaml")


def test_a_digest_in_the_configuration_must_be_that_of_the_policy(project: Path, repository: Path, home: Path):
    url = f"git+file://{repository}"
    good = hashlib.sha256(RULES.encode()).hexdigest()
    pin.pin(url, home, good)
    configure(project, url, f'sha256 = "{"0" * 64}"\n')
    with pytest.raises(BadPolicy):
        Planner("local").plan("job.yaml")
    with pytest.raises(BadPolicy, match="has the digest"):
        pin.pin(url, home, "0" * 64)


def test_a_policy_that_is_wrong_leaves_the_old_copy(repository: Path, home: Path):
    url = f"git+file://{repository}"
    old = pin.pin(url, home)
    (repository / "policy.toml").write_text("[rules.a]\nspot = 3\n")
    commit(repository)
    with pytest.raises(BadPolicy, match="can only be true"):
        pin.pin(url, home)
    assert pin.load(url, home) == old
    (repository / "policy.toml").unlink()
    os.symlink("/etc/hostname", repository / "policy.toml")
    commit(repository)
    with pytest.raises(BadPolicy, match=r"has no policy\.toml"):
        pin.pin(url, home)


class _Server(BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, bytes]] = {}

    def do_GET(self) -> None:
        status, body = self.answers.get(self.path, (404, b""))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 302:
            self.send_header("Location", "/policy.toml")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    http = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    _Server.answers = {
        "/policy.toml": (200, RULES.encode()),
        "/moved": (302, b""),
        "/large": (200, b"#" * (pin.MAX_BYTES + 1)),
        "/bytes": (200, b"\xff\xfe"),
    }
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


def test_an_address_of_a_file(server: str, home: Path):
    assert len(pin.pin(f"{server}/policy.toml", home).rules) == 1
    for name, message in (
        ("moved", "redirect"),
        ("large", "longer than 256 KiB"),
        ("bytes", "not UTF-8"),
        ("no", "404"),
    ):
        with pytest.raises(CloudtrainError, match=message):
            pin.pin(f"{server}/{name}", home)


@pytest.mark.parametrize(
    "url", ["https://me:secret@host/policy.toml", "http://host/policy.toml", "ftp://host/x", "rules"]
)
def test_addresses_with_credentials_or_without_encryption_are_refused(url: str, project: Path):
    configure(project, url)
    with pytest.raises(BadRequest, match=r"policy\.from: is not a known key"):
        Planner("local").plan("job.yaml")
