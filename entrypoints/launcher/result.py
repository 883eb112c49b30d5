"""What an attempt has come to on this node: the uploads that remain, the last lines of its log, its final status."""

from __future__ import annotations

import os
from collections.abc import Callable

from .environment import Prepared
from .log import Log
from .resume import has_files
from .sink import incomplete
from .status import Status, stamp
from .world.cluster import sagemaker_base
from .world.outcome import EXIT_RESUMABLE, Outcome, launcher_code

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any

LONGEST = 800  # characters of a failure; SageMaker keeps 1,024 with its own text around them
EXIT_OUTPUT = 74  # training succeeded, but its results could not be brought to the output


def finish_output(outcome: Outcome, prepared: Prepared, status: Status, given_up: Callable[[], bool]) -> Outcome:
    """Finish the upload of the run's folders; a run whose results are not uploaded has not succeeded.

    Blocking, unless `given_up` becomes true: a person has cancelled the run meanwhile.
    """
    problem = prepared.keeper.finish(outcome.state not in ("SUCCEEDED", "FAILED"), outcome.state == "SUCCEEDED")
    if prepared.sync is not None:
        problem = prepared.sync.finish(given_up, outcome.state == "SUCCEEDED") or problem
    if not problem:
        return outcome
    if outcome.state != "SUCCEEDED":
        return outcome._replace(reason=f"{outcome.reason}; the output is not complete: {problem}")
    if status.cancelled:
        return Outcome("CANCELLED", EXIT_RESUMABLE, "launcher", None, problem)
    return Outcome("FAILED", EXIT_OUTPUT, "launcher", None, f"the output is not complete: {problem}")


def report(outcome: Outcome, log: Log, prepared: Prepared | None) -> dict[str, Any]:
    """Write the last lines of the log, close it, and return the final status."""
    reason = log.masks.apply(outcome.reason.encode("utf-8", "backslashreplace")).decode()[:1000]
    if outcome.state != "SUCCEEDED" and reason:
        log.say(reason)
    remarks: dict[str, Any] = {"not_kept": text} if prepared and (text := prepared.keeper.not_kept) else {}
    if prepared and not has_files(*prepared.folders.values()):
        remarks["has_results"] = False
    if lost := log.settle():
        remarks["incomplete"] = incomplete(lost)
    log.event(
        "result",
        code=launcher_code(outcome),
        state=outcome.state,
        by=outcome.by,
        failed_rank=outcome.failed_rank,
        reason=reason,
        **remarks,
    )
    if outcome.state != "SUCCEEDED":
        write_failure(outcome, reason)
    log.event("state", state=outcome.state)
    log.close()
    return {
        "state": outcome.state,
        "exit_code": outcome.exit_code,
        "by": outcome.by,
        "failed_rank": outcome.failed_rank,
        "reason": reason,
        "ended_at": stamp(log.clock.now()),
    }


def write_failure(outcome: Outcome, reason: str) -> None:
    """Write /opt/ml/output/failure, which SageMaker shows as the job's FailureReason; nothing on other platforms.

    The exit code that SageMaker reports does not distinguish a script's own 75 or 78 from the launcher's.
    """
    base = sagemaker_base(os.environ)
    if not os.path.exists(os.path.join(base, "input", "config", "resourceconfig.json")):
        return
    code = "-" if outcome.exit_code is None else outcome.exit_code
    text = f"{reason[:LONGEST]} [cloudtrain {outcome.state} {code} {outcome.by}]"
    try:
        os.makedirs(os.path.join(base, "output"), exist_ok=True)
        with open(os.path.join(base, "output", "failure"), "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        pass  # the log says it too
