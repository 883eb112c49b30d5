"""How much of cloudtrain one submit goes through: files, their lines, functions, and moves from one file to another.

    python benchmarks/path.py [--list] [--target local|sagemaker]

`sys.setprofile` sees every call of the thread that submits; what other packages, the launcher and the watcher do is not
counted. A module's body counts as a function, an import that leads into another file as a move. Only files with code
count: an __init__.py with a docstring alone does not. SageMaker is our simulator. With --list the files are printed
in the order in which they are entered, and no result is kept. tests/test_path.py holds BOUND.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from measure import report, table

TARGETS = ("local", "sagemaker")
AIM = {"local": 45, "sagemaker": 65}
BOUND = {"local": 45, "sagemaker": 63}  # of tests/test_path.py: lower it with the number, and never raise it
JOB = """
name: bench
source: .
entrypoint: hello.py
"""
SAGEMAKER = """
environment: {requirements: none}
image: any
resources: {instance_type: ml.m5.xlarge}
options: {sagemaker: {role: "arn:aws:iam::123456789012:role/bench", bucket: bench}}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files in order of first entry")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in the process that is measured
    chosen = parser.parse_args()
    if chosen.here:
        print(json.dumps(submit(chosen.target[0])))
        return 0
    found = {target: measured(target) for target in chosen.target or TARGETS}
    if chosen.list:
        for target, path in found.items():
            print(f"{target}: {len(path['files'])} files with code")
            for number, (name, lines) in enumerate(path["files"], 1):
                print(f"{number:4} {name} ({lines} lines)")
        return 0
    rows = [
        (target, len(counts), sum(counts), path["functions"], path["moves"])
        for target, path in found.items()
        for counts in [[lines for _, lines in path["files"]]]
    ]
    body = table(rows, ["a submit on", "files with code", "their lines", "functions", "moves between files"])
    gates = [(f"files, {target}", len(path["files"]), AIM[target]) for target, path in found.items()]
    return report("path", "The files that one submit enters", body, gates)


def measured(target: str) -> dict[str, Any]:
    """Submit in a process of its own, which has imported nothing of cloudtrain."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "hello.py").write_text("print('hello')\n")
        (Path(name) / "job.yaml").write_text(JOB + (SAGEMAKER if target == "sagemaker" else ""))
        env = dict(os.environ, HOME=name, XDG_CONFIG_HOME=name, CLOUDTRAIN_HOME=f"{name}/home")
        simulator = None
        try:
            if target == "sagemaker":
                serve = [sys.executable, "-m", "cloudtrain.simulators.sagemaker", "--bucket", "bench"]
                simulator = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
                env |= exports(simulator)
            command = [sys.executable, str(Path(__file__).absolute()), "--here", "--target", target]
            done = subprocess.run(command, cwd=name, env=env, stdout=subprocess.PIPE, check=True)
        finally:
            if simulator:
                simulator.terminate()
                simulator.wait()
    return dict(json.loads(done.stdout))


def exports(simulator: subprocess.Popen[str]) -> dict[str, str]:
    """Return the variables that a simulator prints when it serves; its address is the last one."""
    found: dict[str, str] = {}
    while "AWS_ENDPOINT_URL" not in found:
        line = simulator.stdout.readline() if simulator.stdout else ""
        if not line:
            sys.exit("the simulator did not start")
        name, _, value = line.removeprefix("export ").strip().partition("=")
        found[name] = value
    return found


def submit(target: str) -> dict[str, Any]:
    """Submit job.yaml under a profile and return what was entered."""
    import cloudtrain

    top = str(Path(cloudtrain.__file__).parent) + os.sep
    files: dict[str, None] = {}
    functions: set[tuple[str, str]] = set()
    moves = 0

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal moves
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(top):
            return
        files[name] = None
        functions.add((name, frame.f_code.co_qualname))
        caller = frame.f_back
        while caller and not caller.f_code.co_filename.startswith(top):
            caller = caller.f_back
        moves += caller is None or caller.f_code.co_filename != name

    from cloudtrain import Submitter

    sys.setprofile(see)
    run = Submitter(target, watch=False).submit("job.yaml")
    sys.setprofile(None)
    if target == "local":
        run.wait()
    lines = [(name.removeprefix(top), length(Path(name).read_text())) for name in files]
    return {"files": [(name, count) for name, count in lines if count], "functions": len(functions), "moves": moves}


def length(text: str) -> int:
    """Return a file's lines; 0 where it holds no code, a docstring at most."""
    body = ast.parse(text).body
    documented = body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return len(text.splitlines()) if body[1 if documented else 0 :] else 0


if __name__ == "__main__":
    sys.exit(main())
