"""A cap over whole histories: whatever happens to platform and client, what the platform bills stays below it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.errors import BadRequest, CloudtrainError, Unreachable
from cloudtrain.job.job import Job
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import retry
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from tests.runs.capped.clock import Clock
from tests.runs.capped.platforms import PLATFORMS, Platform

EACH = 8  # histories of each of five platforms
CALLS = ("submit", "find", "status", "cancel")


class Killed(BaseException):
    """The client's process ends here, without another word."""


class Client:
    """Everything that a person's machine does, where any call may get no answer and any moment be the last one."""

    def __init__(self, platform: Platform, draw: random.Random, patch: pytest.MonkeyPatch) -> None:
        self.draw = draw
        backend = platform.backend
        for name in CALLS:
            patch.setattr(backend, name, self._unsure(name, getattr(backend, name)))
        self.forget()
        patch.setattr(registry, "create", lambda *_, **__: backend)
        patch.setattr(registry, "create_for", lambda *_, **__: backend)

    def forget(self) -> None:
        """Draw what becomes of the first call of each kind; how many calls follow depends on the machine's speed."""
        self.fates = {name: self.draw.choices(["", "lost", "unheard", "killed"], [20, 1, 1, 1])[0] for name in CALLS}

    def _unsure(self, name, call):
        def unsure(*arguments, **named):
            fate = self.fates.pop(name, "")
            if fate == "lost":
                raise Unreachable("nobody answers")
            answer = call(*arguments, **named)
            if fate == "unheard":
                raise Unreachable("it was carried out, and the answer is lost")
            if fate == "killed":
                raise Killed
            return answer

        return unsure

    def look(self, run: Run) -> None:
        """A watcher looks until nothing moves any more, or dies on the way."""
        self.forget()
        try:
            Watcher(run.store, run.run_id, complain=lambda _: None).refresh()
        except (Killed, CloudtrainError):
            pass


def begin(submitter: Submitter, job: Job) -> Run | None:
    """Submit as a person would, who tries again after a crash; None where the cap does not pay for a first attempt."""
    while True:
        try:
            return submitter.submit(job)
        except BadRequest as error:
            assert "limits.max_" in str(error), error
            return None
        except Killed:
            continue


def drawn_job(platform: Platform, draw: random.Random, source: Path) -> tuple[Job, float | None, int | None]:
    """Return a job with its cap in USD or in seconds of each node."""
    usd, hours = round(draw.uniform(3, 60), 2), draw.uniform(0.75, 12)
    money = draw.random() < 0.5
    limits = {"max_runtime": f"{draw.randint(10, 400)}m", "grace": f"{draw.randint(5, 90)}s"}
    limits |= {"max_cost": f"{usd} USD"} if money else {"max_total_runtime": f"{int(hours * 3600)}s"}
    fields = {"name": "capped", "source": str(source), "entrypoint": "train.py", **platform.job, "limits": limits}
    fields["num_nodes"] = 2 if platform.name == "vertex" else draw.choice([1, 2])
    fields["retry"] = {"max_attempts": draw.randint(1, 6)}
    if platform.spot and draw.random() < 0.5 and platform.name != "vertex":
        fields["resources"] = {**fields.get("resources", {}), "use_spot": True}
    return Job.from_dict(fields), usd if money else None, None if money else int(hours * 3600)


def live_through(kind: type[Platform], seed: str, folder: Path, patch: pytest.MonkeyPatch) -> int:
    """Go through one history; return how many attempts it had."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    source = folder / "source"
    source.mkdir()
    (source / "train.py").write_text("print(1)\n")
    clock = Clock(random.Random(f"{seed} platform"), hostile=draw.random() < 0.3)
    platform = kind(clock, folder, patch)
    client = Client(platform, draw, patch)
    patch.setattr(retry, "OUTAGE_S", 0.0)
    patch.setattr(retry, "WITHOUT_CHECKPOINT", 10**6)
    job, usd, seconds = drawn_job(platform, draw, source)
    try:
        run = begin(Submitter(kind.name, home=folder / "home", watch=False, clock=clock, **platform.options), job)
        if run is None:
            return 0
        price = (run.attempts[0].plan.price or {}).get("usd_per_hour", 0.0) / job.num_nodes

        def check() -> None:
            billed_s = platform.billed()
            if usd is not None:
                assert billed_s / 3600 * price <= usd + 0.005, f"{seed}: {billed_s / 3600 * price} of {usd} USD"
            else:
                assert billed_s / job.num_nodes <= seconds + 0.5, f"{seed}: {billed_s / job.num_nodes} of {seconds} s"

        resumes = 5 if clock.hostile else draw.randint(0, 3)
        for _ in range(60):
            limits = run.attempts[-1].plan.manifest
            clock.limits = limits["max_runtime_s"], limits["grace_s"]
            clock.advance(draw.choice([5.0, 60.0, 900.0, draw.uniform(0, 40_000)]))
            check()
            if draw.random() < (0.05 if clock.hostile else 0.3):
                platform.preempt()
                clock.settle()
            if draw.random() < 0.03:
                break  # the machine is never switched on again
            client.look(run)
            if run.record.status.state.final:
                if not resumes or run.record.status.state.value == "SUCCEEDED":
                    break
                resumes -= 1
                client.forget()
                try:
                    run.resume()
                except (Killed, CloudtrainError):
                    continue
        clock.advance(100 * 86400)
        check()
        return len(run.attempts)
    finally:
        platform.close()


def live_through_all(kind: type[Platform], numbers: range, folder: Path) -> list[int]:
    attempts = []
    for number in numbers:
        with pytest.MonkeyPatch.context() as patch:
            attempts.append(live_through(kind, f"{kind.name} {number}", folder / str(number), patch))
        shutil.rmtree(folder / str(number))
    return attempts


@pytest.mark.parametrize("kind", PLATFORMS, ids=lambda kind: kind.name)
def test_no_history_costs_more_than_its_cap(kind: type[Platform], quick_folder: Path):
    attempts = live_through_all(kind, range(EACH), quick_folder)
    assert sum(attempts) > EACH, attempts


@pytest.mark.long
@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("kind", PLATFORMS, ids=lambda kind: kind.name)
def test_no_history_of_many_costs_more_than_its_cap(kind: type[Platform], block: int, quick_folder: Path):
    live_through_all(kind, range(60 * block, 60 * (block + 1)), quick_folder)
