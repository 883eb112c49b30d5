"""What a type checker finds in a call of the public API, before anything runs; pyright could not be installed here."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import cloudtrain
from cloudtrain.job.job import schema
from tests.conftest import WAIT_S

CALLS = """
from pathlib import Path
from cloudtrain import Job, Run, State, Submitter, submit
from cloudtrain.job.sections import Resources

good = Job(
    name="x", source=Path("src"), entrypoint="train.py", num_nodes=2, hyperparameters={"lr": 3e-4}, args=["a", 1],
    resources={"accelerators": "A100:8", "use_spot": True}, inputs={"data": "s3://b/d", "more": {"uri": "/data"}},
    limits={"max_runtime": "2h"}, retry={"max_attempts": 3}, env={"A": 1}, output=Path("out"), metrics="off",
)
Job(entrypoint=["python", "train.py"], resources=Resources(accelerators="A100:8"))
good.replace(num_nodes=3)
run: Run = submit(good)
state: State = run.wait(10.0).state
Submitter("local").plan(good)
Job(entrypont="train.py")  # error: entrypont
Job(num_nodes="two")  # error: num_nodes
Job(resources={"accelerator": "A100"})  # error: ResourcesKeys
Job(limits={"max_runtime": 3600})  # error: LimitsKeys
Job(arg_style="click")  # error: arg_style
good.replace(num_node=3)  # error: num_node
run.wait("10 s")  # error: wait
run.cancle()  # error: cancle
"""


def test_mypy_finds_a_misspelt_key_and_a_wrong_type(tmp_path):
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    argv = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", f"--cache-dir={tmp_path}", str(script)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path)
    wrong = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if " error: " in line}
    expected = {number: text for number, text in enumerate(CALLS.splitlines(), 1) if "# error: " in text}
    assert wrong.keys() == expected.keys(), done.stdout + done.stderr
    assert all(text.split("# error: ")[1] in wrong[number] for number, text in expected.items()), done.stdout


def test_help_lists_the_keys_and_their_plain_defaults():
    keys = list(schema()["properties"])
    assert list(inspect.signature(cloudtrain.Job).parameters) == keys
    assert re.findall(r"^    (\w+): ", inspect.getdoc(cloudtrain.Job), re.MULTILINE) == keys
    assert len(str(inspect.signature(cloudtrain.Job))) < 1000 and "limits={}" in str(inspect.signature(cloudtrain.Job))


def test_the_stub_of_the_keys_is_packaged():
    assert (Path(cloudtrain.__file__).parent / "job" / "keys.pyi").is_file()
