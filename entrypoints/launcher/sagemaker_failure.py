"""Write /opt/ml/output/failure, which SageMaker shows as the job's FailureReason."""

from __future__ import annotations

import os

from .world.cluster import sagemaker_base
from .world.outcome import Outcome

LONGEST = 800  # characters; SageMaker keeps 1,024 with its own text around them


def write(outcome: Outcome, reason: str) -> None:
    """Write why the attempt did not succeed, for people and for programs; writes nothing except on SageMaker.

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
