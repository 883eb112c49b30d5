"""Law 3, submissions: drawn sequences of lost answers on SageMaker through the SDK's HuggingFace estimator.

The SDK is in an environment of its own, so this file is also a program: `python -m tests.laws.test_law3_outcomes_sdk
FOLDER FIRST COUNT` drives sequences in one process, which imports the SDK once, and prints what was done as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.lab.sdk import run
from tests.laws.outcomes import LONG, NORMAL, drive, recorded
from tests.seed import first_seed

FITS = "calls of the estimator's fit"


def main(folder: Path, first: int, count: int) -> Counter[str]:
    import boto3
    import sagemaker.utils
    from sagemaker.huggingface import HuggingFace

    from cloudtrain.backends import aws
    from cloudtrain.simulators.sagemaker.server import REGION
    from tests.laws.test_law3_outcomes import Sagemaker, hurry

    done: Counter[str] = Counter()
    fit = HuggingFace.fit

    def counted(*given: object, **more: object) -> object:
        done[FITS] += 1
        return fit(*given, **more)

    with pytest.MonkeyPatch.context() as patch, recorded("sagemaker", patch):
        hurry(patch)
        patch.setattr(HuggingFace, "fit", counted)
        patch.setattr(sagemaker.utils, "validate_sagemaker_config", lambda _: None)  # a second for each `fit`
        patch.setattr(aws.Aws, "session", boto3.Session(region_name=REGION))  # it keeps what its clients load
        platform = Sagemaker(folder / "platform", client="sdk")
        for seed in range(first, first + count):
            done += drive(platform, folder / str(seed), seed)
        platform.close()
    return done


def sequences(sdk: Path, folder: Path, count: int, figure) -> None:
    first = first_seed()
    quiet = {"SAGEMAKER_SUPPRESS_V2_WARNING": "1"}
    done = json.loads(run(sdk, "-m", __name__, folder, first, count, timeout_s=20.0 * count, **quiet))
    assert done[FITS] >= count, done
    figure("sequences of lost answers through the SDK's estimator", count)
    for action, times in sorted(done.items()):
        figure(f"actions in them: {action}", times)


@pytest.mark.timeout(1200)
def test_the_estimator_loses_answers(sdk, tmp_path, figure):
    sequences(sdk, tmp_path, NORMAL // 2, figure)


@pytest.mark.long
@pytest.mark.timeout(4200)
def test_the_estimator_loses_answers_for_long(sdk, tmp_path, figure):
    sequences(sdk, tmp_path, LONG, figure)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
