"""The plan: pure, complete, the same for everybody."""

from __future__ import annotations

import random
import socket
import time
from typing import Any

import pytest

from cloudtrain.backends import registry
from cloudtrain.backends.api import Backend, Plan
from cloudtrain.clock import SYSTEM
from cloudtrain.job import rules
from cloudtrain.job.job import Job
from cloudtrain.testing.elsewhere import SURROUNDINGS, Elsewhere
from cloudtrain.testing.fixtures import ContractFixtures
from cloudtrain.testing.suite.hostile import HOSTILE


class PlanContract(ContractFixtures):
    """What `plan`, `options` and `check` promise."""

    def test_it_is_a_backend(self, backend: Backend) -> None:
        assert isinstance(backend, Backend)
        assert backend.name
        assert backend.traits.keys.keys() <= {*rules.platform_keys(), *rules.SHARED_KEYS}
        assert backend.traits.shell == (type(backend).shell is not Backend.shell)
        assert registry.backend_class(backend.name) is type(backend)
        assert isinstance(type(backend).discover(), dict)

    def test_unknown_options_are_refused(self, backend: Backend) -> None:
        from pydantic import ValidationError

        with pytest.raises(ValidationError):
            type(backend).options().model_validate({"no_such_option": 1})

    def test_plan_is_pure(self, backend: Backend, prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        plan, bundle = prepare("print(1)", run_id="pure-run")
        job = Job.from_dict(plan.job)

        def forbidden(*_: Any, **__: Any) -> Any:
            raise AssertionError("plan() used the network, the clock, randomness or a process")

        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", forbidden)
            for name in ("time", "time_ns"):
                patch.setattr(time, name, forbidden)
            for name in ("os.urandom", "os.fork", "os.posix_spawn", "os.system", "subprocess.Popen"):
                patch.setattr(name, forbidden)
            patch.setattr(random, "random", forbidden)
            again = backend.plan(job, bundle, "pure-run", 1)
        SYSTEM.sleep(1.1)  # a timestamp in the plan would differ by now
        assert again == plan == backend.plan(job, bundle, "pure-run", 1)

    def test_plan_survives_json(self, prepare: Any) -> None:
        plan, _ = prepare("print(1)", args=HOSTILE, env={"A": "b c"})
        assert Plan.from_json(plan.to_json()) == plan

    def test_plan_is_the_same_elsewhere(self, backend: Backend, elsewhere: Elsewhere, prepare: Any) -> None:
        """In another process, with another clock, locale, umask and working directory."""
        plan, bundle = prepare("print(1)", args=HOSTILE, hyperparameters={"lr": "3.0e-4"})
        for _ in SURROUNDINGS:
            assert elsewhere("plan", Job.from_dict(plan.job), bundle, plan.run_id, plan.attempt) == plan

    def test_the_time_limit_is_that_of_the_job(self, backend: Backend, prepare: Any) -> None:
        """A platform without one says why; a longer job has a longer one, of which nothing is missing."""
        short, long = (backend.time_limit(prepare("print(1)", limits={"max_runtime": f"{n}h"})[0]) for n in (1, 3))
        if short.seconds is None or long.seconds is None:
            assert short.note and long.note
            return
        assert short.seconds >= 3600 and long.seconds - short.seconds >= 7200

    def test_check_returns_problems(self, backend: Backend) -> None:
        assert all(problem.message for problem in backend.check())
