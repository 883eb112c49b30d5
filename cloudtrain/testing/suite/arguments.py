"""Arguments, hyperparameters and environment variables reach the script as written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cloudtrain.backends.api import Backend
from cloudtrain.events import State
from cloudtrain.testing.fixtures import ContractFixtures
from cloudtrain.testing.suite.hostile import HOSTILE


class ArgumentsContract(ContractFixtures):
    """What a script finds in its command line and environment."""

    def test_arguments_arrive_as_written(self, backend: Backend, start: Any) -> None:
        """Hyperparameters first. A number that is read and written again would be another text."""
        texts = {"lr": "3.0e-4", "beta": "1.10", "layers": "007", "seed": "12345678901234567890", "name": "no"}
        handle = start("import json, sys; print(json.dumps(sys.argv[1:]))", hyperparameters=texts, args=HOSTILE)
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        words = [word for name, text in texts.items() for word in (f"--{name}", text)]
        assert json.loads(self.script_lines(backend, handle)[0].text) == [*words, *HOSTILE]

    def test_the_submitters_environment_stays_with_it(
        self, backend: Backend, start: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if backend.traits.in_place:
            pytest.skip("its ranks are processes of the shell that submits")
        monkeypatch.setenv("CONTRACT_OF_THE_SUBMITTER", "here")
        handle = start("import os; print(os.environ.get('CONTRACT_OF_THE_SUBMITTER'))")
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        assert [line.text for line in self.script_lines(backend, handle)] == ["None"]

    def test_environment_arrives_as_written(self, backend: Backend, start: Any) -> None:
        env = {f"CONTRACT_{n}": text for n, text in enumerate(HOSTILE)}
        script = (
            "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('CONTRACT_')}))"
        )
        handle = start(script, env=env)
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        assert json.loads(self.script_lines(backend, handle)[0].text) == env
