"""What type checkers find in a call of the public API, before anything runs: mypy, and pyright as basedpyright has it.

basedpyright is pyright in a package of PyPI that brings its own Node.js; its mode `strict` is pyright's.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.job.job import schema
from tests.conftest import WAIT_S

CALLS = """
from pathlib import Path
from cloudtrain import DistributedTraining, Job, Run, State, Submitter, Sweep, submit
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
Submitter("local", watch=False, force=True).submit("job.yaml", sets=["num_nodes=2"], after=[run, "x-1"])
result = DistributedTraining(target="local").train_distributed({"model_name": "net"}, {"samples": 8}, nodes=2)
loss: float = result["final_loss"]
Job(entrypont="train.py")  # error: entrypont
Job(num_nodes="two")  # error: num_nodes
Job(resources={"accelerator": "A100"})  # error: ResourcesKeys
Job(limits={"max_runtime": 3600})  # error: LimitsKeys
Job(arg_style="click")  # error: arg_style
good.replace(num_node=3)  # error: num_node
run.wait("10 s")  # error: wait
run.cancle()  # error: cancle
Submitter(7)  # error: str | None
Submitter("local").submit(good, keys="x")  # error: keys
submit(good, after="x-1", key=1)  # error: key
run.fetch(into=3)  # error: into
DistributedTraining(target=["a"])  # error: target
DistributedTraining().train_distributed(1, 2, nodes="two")  # error: nodes
result["loss"]  # error: loss
Sweep("job.yaml", ["lr"])  # error: list[str]
"""


def _mypy(script: Path) -> dict[int, str]:
    """Return the errors of mypy --strict by line."""
    argv = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", f"--cache-dir={script.parent}", str(script)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, cwd=script.parent)
    assert done.returncode == 1, done.stdout + done.stderr
    return {int(line.split(":")[1]): line for line in done.stdout.splitlines() if " error: " in line}


def _pyright(script: Path) -> dict[int, str]:
    """Return the errors of pyright by line, in its mode `strict` without its rules of style."""
    style = {f"report{rule}": False for rule in ("UnusedExpression", "UnusedCallResult", "UnknownMemberType")}
    (script.parent / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict", **style}))
    argv = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, str(script)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, cwd=script.parent)
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[int, str] = {}
    for error in json.loads(done.stdout)["generalDiagnostics"]:
        if error["severity"] == "error":
            line = error["range"]["start"]["line"] + 1
            found[line] = found.get(line, "") + error["message"]
    return found


@pytest.mark.parametrize("errors_by_line", [_mypy, _pyright])
def test_type_checkers_find_a_misspelt_key_and_a_wrong_type(errors_by_line, tmp_path):
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    wrong = errors_by_line(script)
    lines = enumerate(CALLS.splitlines(), 1)
    expected = {number: text.split("# error: ")[1] for number, text in lines if "# error: " in text}
    assert wrong.keys() == expected.keys(), wrong
    assert [number for number, name in expected.items() if name not in wrong[number]] == [], wrong


def test_help_lists_the_keys_and_their_plain_defaults():
    keys = list(schema()["properties"])
    assert list(inspect.signature(cloudtrain.Job).parameters) == keys
    args = inspect.getdoc(cloudtrain.Job).partition("\nArgs:\n")[2]
    assert re.findall(r"^    (\w+): ", args, re.MULTILINE) == keys
    assert len(str(inspect.signature(cloudtrain.Job))) < 1000 and "limits={}" in str(inspect.signature(cloudtrain.Job))


def test_the_stub_of_the_keys_is_packaged():
    assert (Path(cloudtrain.__file__).parent / "job" / "keys.pyi").is_file()
