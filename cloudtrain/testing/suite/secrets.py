"""Secrets: they reach the ranks, and stand in no plan, bundle, command line, other environment, file or log."""

from __future__ import annotations

import random
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.api import Backend
from cloudtrain.events import State
from cloudtrain.testing.fixtures import ContractFixtures
from cloudtrain.testing.machine import ProcessSearch, below, files_at_the_top, files_with, forms, is_open


class SecretsContract(ContractFixtures):
    """What a backend with `secrets.env` promises."""

    @pytest.fixture
    def secret(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> str:
        """A value of the environment variable CONTRACT_SECRET that nobody else has."""
        self.require(backend, "secrets.env")
        value = f's3cr3t {random.getrandbits(64):016x}+"of the suite"'
        monkeypatch.setenv("CONTRACT_SECRET", value)
        return value

    def test_plan_holds_no_secret(self, secret: str, prepare: Any) -> None:
        plan, _ = prepare("print(1)", secrets={"TOKEN": ["env:CONTRACT_SECRET"]})
        assert not [form for form in forms(secret) if form in plan.to_json().encode()]

    def test_secrets_reach_the_script_and_nothing_else(
        self, backend: Backend, secret: str, start: Any, tmp_path: Path
    ) -> None:
        """Searched are processes and files of this machine, `folders()`, the log, and what `fetch` brings.

        No other user may write to the ranks' folders: who does may read what comes next.
        """
        script = (
            "import hashlib, os, time\n"
            "token = os.environ['TOKEN']\n"
            "print(hashlib.sha256(token.encode()).hexdigest())\n"
            "print('it is', token, flush=True)\n"
            "time.sleep(1)\n"
        )
        needles, mark = forms(secret), f"rank-of-{random.getrandbits(64):016x}"
        before = set(files_at_the_top())
        with ProcessSearch(needles, mark.encode()) as search:
            handle = start(script, secrets={"TOKEN": ["env:CONTRACT_SECRET"]}, args=[mark])
            self.until_line(backend, handle, "it is")
            found = files_with(needles, [*search.folders, *(set(files_at_the_top()) - before)])
            open_to_all = [str(path) for folder in search.folders for path in below(folder) if is_open(path)]
            assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        first, second = (line.text for line in self.script_lines(backend, handle))
        assert first == sha256(secret.encode()).hexdigest()
        assert second.startswith("it is ") and second != f"it is {secret}"
        backend.fetch(handle, tmp_path / "fetched")
        found += files_with(needles, [tmp_path, *self.folders()])
        found += [
            f"in the log: {line}" for line in backend.logs(handle) if any(n in line.text.encode() for n in needles)
        ]
        assert not search.found and not found, [*search.found, *found]
        assert not open_to_all, "every user may write to these files"
