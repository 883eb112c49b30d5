"""Using the library changes nothing of the process that uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import WAIT_S

LOOK = """
import gc, json, locale, logging, multiprocessing, os, signal, sys, threading, warnings
import pydantic

def process():
    loggers = [logging.getLogger(name) for name in ("", *sorted(logging.root.manager.loggerDict))]
    return {
        "collector": [gc.isenabled(), *gc.get_threshold()],
        "variables": dict(os.environ),
        "import hooks": [list(map(repr, sys.meta_path)), list(map(repr, sys.path_hooks)), list(sys.path)],
        "hooks": list(map(repr, (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook))),
        "signals": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "locale": locale.setlocale(locale.LC_ALL),
        "logging": {each.name: [each.level, list(map(repr, each.handlers)), each.propagate]
                    for each in loggers if each.level or each.handlers or not each.propagate},
        "start method": multiprocessing.get_start_method(allow_none=True),
        "warnings": list(map(repr, warnings.filters)),
        "folder": os.getcwd(),
        "umask": (mask := os.umask(0), os.umask(mask))[0],
        "streams": [id(sys.stdin), id(sys.stdout), id(sys.stderr)],
    }

before = process()
changes = {}
def look(after):
    for name, value in process().items():
        if value != before[name]:
            changes[f"{name}, {after}"] = [before[name], value]

import cloudtrain
look("import cloudtrain")
cloudtrain.Job
look("cloudtrain.Job")
submitter = cloudtrain.Submitter()
submitter.plan({"entrypoint": "train.py"})
look("plan")
for target, options in TARGETS.items():
    cloudtrain.Submitter(target, **options).plan({"entrypoint": "train.py", "image": IMAGE})
    look(f"plan of {target}")
run = submitter.submit({"entrypoint": "train.py"})
look("submit")
run.wait()
look("wait")
print(json.dumps(changes))
"""
IMAGE = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/train:1"
TARGETS = {
    "sagemaker": {"role": "arn:aws:iam::111122223333:role/train", "region": "eu-west-1", "bucket": "my-bucket"},
    "vertex": {"project": "my-project", "region": "europe-west4", "bucket": "my-bucket"},
    "kubernetes": {"context": "none", "namespace": "team"},
}


def test_using_the_library_changes_nothing_of_its_process(tmp_path: Path, census: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print(1)\n")
    code = LOOK.replace("TARGETS", repr(TARGETS)).replace("IMAGE", repr(IMAGE))
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}
