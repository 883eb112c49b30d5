"""Two runs with two accounts' credentials in one home: one watcher, and no call of one run has the other's key."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from cloudtrain.simulators.sagemaker.server import Simulator
from tests.backends.sagemaker.test_backend import BUCKET
from tests.backends.sagemaker.test_quickstart import ROOT, target  # noqa: F401 - a fixture
from tests.conftest import WAIT_S, processes_of, wait_for

pytestmark = pytest.mark.usefixtures("census")
SCRIPT = """
import pathlib, sys, time
print("there", flush=True)
while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)
"""
_KEY = re.compile(r"Credential=([^/]+)/")


class Recorder(Simulator):
    """Remembers with which access key each call came, and its text."""

    def __init__(self, folder: Path) -> None:
        self.signed: list[tuple[str, str]] = []
        super().__init__(folder)

    def _serve(self, environ, start):
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        if key := _KEY.search(environ.get("HTTP_AUTHORIZATION", "")):
            text = f"{environ['PATH_INFO']} {environ.get('HTTP_X_AMZ_TARGET', '')} {body[:4096]!r}"
            self.signed.append((key[1], text))
        return super()._serve(environ, start)


@pytest.fixture
def simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = Recorder(tmp_path / "hosts")
    for name, value in started.environ.items():
        monkeypatch.setenv(name, value)
    with urlopen(Request(f"{started.url}/moto-api/reset", method="POST"), timeout=60):
        pass
    started.make_bucket(BUCKET)
    yield started
    started.close()


def test_no_call_of_a_run_has_the_key_of_another(simulator: Recorder, target, home, tmp_path):  # noqa: F811
    script, gate = tmp_path / "project" / "train.py", tmp_path / "gate"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    profiles = tmp_path / "credentials"
    sections = [f"[{name}]\naws_access_key_id = KEY{name}\naws_secret_access_key = x\n" for name in ("one", "two")]
    profiles.write_text("\n".join(sections))
    plain = {
        name: value for name, value in os.environ.items() if name not in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    }
    shells = {
        "KEYone": plain | {"AWS_PROFILE": "one", "AWS_SHARED_CREDENTIALS_FILE": str(profiles)},
        "KEYtwo": plain | {"AWS_PROFILE": "two", "AWS_SHARED_CREDENTIALS_FILE": str(profiles)},
        "KEYthree": plain | {"AWS_ACCESS_KEY_ID": "KEYthree", "AWS_SECRET_ACCESS_KEY": "never-stored-value"},
    }

    def command(env: dict[str, str], *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "cloudtrain.cli", *words],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    sets = ["--set", "environment.requirements=none", "--set", "processes_per_node=1"]
    runs = {}
    for key, env in shells.items():
        output = command(env, "submit", str(script), "-t", target, *sets, "--new", "--json", "--", str(gate))
        runs[key] = str(json.loads(output.splitlines()[-1])["run_id"])
    submitted = len(simulator.signed)

    def watched_calls(run_id: str, action: str) -> list[str]:
        return [key for key, text in simulator.signed[submitted:] if action in text and run_id in text]

    for run_id in runs.values():
        wait_for(lambda run_id=run_id: watched_calls(run_id, "GetLogEvents"), "its log was read", 2 * WAIT_S)
    watching = [line for line in processes_of(home) if "runs.watching.watch_all" in line]
    assert sum("--worker" not in line for line in watching) == 1, "one watcher"
    assert sum("--worker" in line for line in watching) == 2, "and a process for each of the other two accounts"
    gate.touch()
    for key, run_id in runs.items():
        command(shells[key], "wait", run_id)
    used = defaultdict(set)
    for key, text in simulator.signed:
        if key in shells:
            for owner, run_id in runs.items():
                if run_id in text:
                    used[owner].add(key)
    assert used == {key: {key} for key in shells}
    stored = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    assert b"never-stored-value" not in stored and b"KEYthree" not in stored
    assert b'"AWS_PROFILE": "two"' in stored, "the name of a profile is"
