"""What each way in imports: a set of modules, since a time would depend on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import WAIT_S

# Runs a statement without a network, then says which modules it imported.
LOOK = """
import sys
before = set(sys.modules)
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.bind", "socket.sendto"):
        raise AssertionError(f"the network: {event} {arguments}")
sys.addaudithook(refuse)
import io
shown, sys.stdout = sys.stdout, io.TextIOWrapper(io.BytesIO())
{statement}
sys.stdout = shown
found = sorted(set(sys.modules) - before)
import json
print(json.dumps(found))
"""
HEAVY = {
    "torch", "transformers", "accelerate", "datasets", "numpy", "rich", "pydantic", "yaml", "isal", "pathspec", "sqlite3",
    "boto3", "botocore", "sagemaker", "google", "kubernetes", "asyncssh", "paramiko", "plotly", "nicegui",
}  # fmt: skip
SDKS = HEAVY - {"pydantic", "yaml", "isal", "pathspec", "sqlite3"}


def imported(statement: str, cwd=None, **env: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOOK.replace("{statement}", statement)],
        capture_output=True, text=True, timeout=WAIT_S, cwd=cwd, env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def command(*words: str) -> str:
    return f"from cloudtrain.cli import main; assert main({list(words)!r}) == 0"


def tops(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "cloudtrain"}


def foreign(modules: set[str]) -> set[str]:
    return tops(modules) - sys.stdlib_module_names - {"cloudtrain"}


def test_import_cloudtrain_imports_itself_only():
    assert imported("import cloudtrain") <= {"cloudtrain", "__future__"}


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["--version"]])
def test_help_imports_click_and_the_table(words):
    found = imported(command(*words))
    version = {"cloudtrain.__about__"} if "--version" in words else set()
    assert ours(found) == {"cloudtrain", "cloudtrain.cli"} | version
    assert foreign(found) == {"click"}


def test_plan_of_a_script_needs_no_network_and_no_sdk(tmp_path):
    (tmp_path / "train.py").write_text("print(1)\n")
    found = imported(command("plan", "train.py", "--json"), cwd=tmp_path)
    assert not tops(found) & {*SDKS, "sqlite3"}
    assert not ours(found) & {
        f"cloudtrain.{name}"
        for name in ("history.database", "history.store", "runs.run", "runs.watching.watch", "runs.submit")
    }
    assert {
        name.split(".")[2] for name in found if name.startswith("cloudtrain.backends.") and name.count(".") > 2
    } == {"local"}
    assert {name for name in ours(found) if name.startswith("cloudtrain.cli.")} <= {
        f"cloudtrain.cli.{name}" for name in ("plan", "view")
    } | {f"cloudtrain.cli.view.{name}" for name in ("columns", "jobs", "options", "planned", "runs", "terminal")}


def test_plan_of_a_job_file_needs_no_network_and_no_sdk(tmp_path):
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "job.yaml").write_text("entrypoint: train.py\nnum_nodes: 2\nsecrets: {TOKEN: env:TOKEN}\n")
    assert not tops(imported(command("plan"), cwd=tmp_path)) & SDKS


def test_submit_needs_no_sdk(tmp_path):
    (tmp_path / "train.py").write_text("print(1)\n")
    assert not tops(imported(command("submit", "train.py", "--wait"), cwd=tmp_path)) & SDKS


@pytest.mark.parametrize("words", [["ls"], ["ls", "--json"], ["doctor"]])
def test_commands_that_read_need_neither_pydantic_nor_yaml(words, tmp_path):
    found = imported(command(*words), cwd=tmp_path)
    assert not tops(found) & (HEAVY - {"sqlite3"})


def test_logs_and_show_need_neither_pydantic_nor_yaml(tmp_path):
    (tmp_path / "train.py").write_text("import os\nopen(os.environ['CLOUDTRAIN_MODEL_DIR'] + '/m', 'w').close()\n")
    imported(command("submit", "train.py", "--wait"), cwd=tmp_path)
    for words in (["logs"], ["show"], ["show", "--json"], ["metrics"], ["wait"], ["fetch", "-o", "out"]):
        assert not tops(imported(command(*words), cwd=tmp_path)) & (HEAVY - {"sqlite3"}), words
