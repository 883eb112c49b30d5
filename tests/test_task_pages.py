"""The first page and those in the folders of docs/: files and commands are planned, and what they print is on the page.

A block with a title is a file of the project. A `bash` block holds commands of cloudtrain: `plan`, `init` and `package` run,
`submit` is planned, of others the options are parsed. The plain block behind it is the output; `...` stands for any lines.
In tables of the migrations the right cell holds commands, options of `plan` and keys of the job file.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import click
import pytest
import yaml

from cloudtrain import DistributedTraining, Job, Run
from cloudtrain.cli import main, program

DOCS = Path(__file__).parents[1] / "docs"
FOLDERS = ("start", "how", "migrate", "concepts", "reference")
PAGES = [
    DOCS / "index.md",
    DOCS / "spec.md",
    *sorted(page for folder in FOLDERS for page in (DOCS / folder).glob("*.md")),
]
BLOCK = re.compile(r'^```(\w*)(?: title="(.+?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
FILES = {
    "package/__init__.py": "",
    "package/train.py": "print('trained')\n",
    "run.sh": "python train.py\n",
    "prepare.sh": "true\n",
    "texts/one.txt": "a text\n",
    "chat.jsonl": '{"prompt": "1 + 1?", "completion": "2"}\n',
    "validation.jsonl": '{"prompt": "1 + 2?", "completion": "3"}\n',
    "preferences.jsonl": '{"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}\n',
    "requirements.txt": "accelerate\n",
    "fsdp.yaml": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n",
}


class Block(NamedTuple):
    """A fenced block of a page."""

    kind: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


SCRIPT = next(block.text for block in blocks(DOCS / "start" / "local.md") if block.title == "train.py")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my-project"
    for name, text in {**FILES, "train.py": SCRIPT}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_TOKEN", "a-token-of-nobody")
    return folder


def parse(words: list[str]) -> None:
    """Let click read a command's words, and run nothing."""
    with click.Context(program, info_name="cloudtrain") as parent:
        command = program.get_command(parent, words[0])
        assert command is not None, words
        command.make_context(words[0], words[1:], parent=parent)


def plain(text: str) -> list[str]:
    """Return a text's lines without what differs between two runs: ids, times, widths."""
    text = re.sub(r"-\d{6}-\d{6}-\w{4}\b", "-ID", text)
    return [
        " ".join(re.sub(r"\b(\d+[dhms]\b ?)+", "TIME ", line).split()) for line in text.splitlines() if line.strip()
    ]


def check_output(shown: str, printed: str) -> None:
    """Check that a page's lines are printed, in their order; one with `...` counts up to there."""
    lines = iter(plain(printed))
    for line in plain(shown):
        head, cut, _ = line.partition("...")
        there = line == "..." or any(other.startswith(head) if cut else other == line for other in lines)
        assert there, f"not printed: {line}\n{printed}"


def follow(page: Path, project: Path, do: Callable[[str], str | None]) -> None:
    """Write the files of a page and do its commands, in their order; check each output that it shows and that is known."""
    printed = None
    for block in blocks(page):
        if block.title:
            (project / block.title).parent.mkdir(parents=True, exist_ok=True)
            (project / block.title).write_text(block.text)
        elif block.kind == "bash":
            for line in block.text.splitlines():
                printed = do(line)
        elif not block.kind and printed is not None:
            check_output(block.text, printed)
        if block.kind != "bash":
            printed = None


RUN_AS_A_WHOLE = DOCS / "how" / "evaluate.md"  # its later jobs read what the first one has left


def test_the_page_has_every_variable_that_the_command_reads():
    page = (DOCS / "reference" / "variables.md").read_text()
    code = [path.read_text() for path in (DOCS.parent / "cloudtrain").rglob("*.py") if "testing" not in path.parts]
    read = set(
        re.findall(r"""environ(?:\.get\(|\[)["'](CLOUDTRAIN_\w+|XDG_\w+|HF_\w+|NO_COLOR)["']""", "\n".join(code))
    )
    assert {"CLOUDTRAIN_HOME", "CLOUDTRAIN_CONFIG_HOME", "HF_HOME"} <= read
    own = {"CLOUDTRAIN_NODE_DIR", "CLOUDTRAIN_SIMULATED"}  # set by cloudtrain itself, for processes that it starts
    assert [name for name in sorted(read - own) if f"`{name}" not in page] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != RUN_AS_A_WHOLE], ids=lambda page: f"{page.parent.name}/{page.stem}"
)
def test_files_and_commands_are_planned(page: Path, project: Path, capsys: pytest.CaptureFixture[str]):
    def do(line: str) -> str | None:
        program, *words = shlex.split(line, comments=True)
        assert program == "cloudtrain", line
        if not words[0].startswith("-"):
            parse(words)
        planned = [
            word for word in words[1:] if word not in ("--follow", "--wait", "--new", "--on-interrupt", "cancel")
        ]
        runs = words[0] in ("plan", "init", "--version") or words == ["doctor"]
        if runs or words[0] == "submit":
            assert main(words if runs else ["plan", *planned]) == 0, (line, capsys.readouterr())
        printed = capsys.readouterr().out
        return printed if runs else None

    follow(page, project, do)


@pytest.mark.usefixtures("census")
def test_the_first_run_prints_what_the_page_shows(project: Path, capsys: pytest.CaptureFixture[str]):
    def do(line: str) -> str:
        assert main(shlex.split(line)[1:]) == 0, (line, capsys.readouterr())
        return capsys.readouterr().out

    follow(DOCS / "start" / "local.md", project, do)
    assert (project / "out" / "model" / "weight.txt").exists()


@pytest.mark.usefixtures("census")
def test_the_functions_of_the_page_run_as_it_shows(project: Path):
    script, more = (block.text for block in blocks(DOCS / "how" / "functions.md") if block.kind == "python")
    (project / "train.py").write_text(script + indent(more, "    "))
    done = subprocess.run([sys.executable, "train.py"], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = next(block.text for block in blocks(DOCS / "how" / "functions.md") if block.kind == "text")
    assert done.stdout == shown + "[(0, 0.813), (0, 1.971), (0, 2.625)]\n"


def test_the_function_of_the_migration_is_planned(project: Path, capsys: pytest.CaptureFixture[str]):
    page = {block.kind: block.text for block in blocks(DOCS / "migrate" / "submitit.md")}
    (project / "cloudtrain.toml").write_text(page["toml"])
    exec(page["python"], {"__name__": "__main__"})
    planned = capsys.readouterr().out
    assert "--exclude=node7" in planned and "--nodes=2" in planned


@pytest.mark.usefixtures("census")
def test_ranks_have_the_variables_of_the_page(project: Path, capsys: pytest.CaptureFixture[str]):
    (project / "train.py").write_text("import os\nprint(*sorted(os.environ))\n")
    (project / "data").mkdir()
    options = ["--processes", "2", "--set", "inputs.name=data", "--set", "checkpoint.every=15m"]
    assert main(["submit", "train.py", *options, "--wait"]) == 0, capsys.readouterr()
    assert main(["logs", "--rank", "1", "--raw"]) == 0
    has = set(capsys.readouterr().out.split())
    table = (DOCS / "reference" / "variables.md").read_text().partition("## In a command")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert len(named) == 19 and named <= has, named - has


@pytest.mark.usefixtures("census")
def test_the_notebook_runs_and_names_what_is_there(project: Path, capsys: pytest.CaptureFixture[str]):
    cells_of_page = (block.text for block in blocks(DOCS / "start" / "notebook.md") if block.kind == "python")
    first, second, plot, function, third, load = cells_of_page
    cells: dict[str, Any] = {}
    exec(first + second, cells)
    (curve,) = eval(plot, cells).data
    assert list(curve.x) == [10, 20, 30, 40, 50]
    printed = capsys.readouterr().out
    assert "{'step': 50, 'loss': 0.0003}" in printed and "SUCCEEDED 0.0003" in printed
    exec(function, cells)
    assert capsys.readouterr().out == "8 [2, 4, 6]\n"
    (call,) = (
        node
        for node in ast.walk(ast.parse(third))
        if getattr(getattr(node, "func", None), "attr", "") == "train_distributed"
    )
    accepted = {*inspect.signature(DistributedTraining.train_distributed).parameters, *Job.model_fields}
    assert {word.arg for word in call.keywords} <= accepted
    (model,) = (ast.unparse(node) for node in ast.parse(load).body if ast.unparse(node).startswith("model = "))
    assert model in ast.unparse(ast.parse(third)), "the weights are loaded into the model that was trained"


def test_what_pages_tell_to_submit_is_shown_on_a_page():
    """An installed cloudtrain has no folder `examples`: the files are on pages, and are those of the repository."""
    named = [path.name for path in DOCS.rglob("*.md") if re.search(r"(?<!`)examples/\w", path.read_text())]
    assert named == []
    shown = {block.title: block.text for page in PAGES for block in blocks(page)}
    for title, example in {"quickstart.yaml": "job.yaml", "tune.yaml": "sweep.yaml"}.items():
        kept = yaml.safe_load((DOCS.parent / "examples" / "quickstart" / example).read_text())
        assert yaml.safe_load(shown[title]) == ({**kept, "job": "quickstart.yaml"} if "job" in kept else kept), title


def test_the_page_of_the_installation_has_every_extra():
    extras = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    shown = re.findall(r"^\| `(\w+)` \|", (DOCS / "start" / "install.md").read_text(), re.MULTILINE)
    assert set(shown) == set(extras) - {"dev", "eval"}, "eval is what an evaluation's job installs on its node"


def test_the_sweep_of_the_picture_is_the_one_that_is_printed():
    from PIL import Image

    page = (DOCS / "how" / "sweep.md").read_text()
    with Image.open(DOCS / "pictures" / "sweep.png") as picture:
        assert f"`show` printed:\n\n```text\n{picture.text['sweep']}  SUCCEEDED" in page
    (best,) = re.findall(r"^        (cloudtrain fetch \S+ -o best)$", page, re.MULTILINE)
    assert f"\n{best}\n```\n\n`show` printed" in page


def cells() -> list[tuple[str, str]]:
    """Return what stands as code in the right cells of the migrations' tables: (page, text)."""
    found = []
    for page in PAGES:
        rows = re.findall(r"^\|.*\| (.*) \|$", page.read_text(), re.MULTILINE) if page.parent.name == "migrate" else ()
        found += [(page.stem, text) for row in rows for text in re.findall(r"`([^`]+)`", row)]
    return found


def job_with(text: str) -> dict[str, Any] | None:
    """Return a job with a key as a table has it (`resources.cpus: 8`), None where the text is none."""
    key = text.partition(": ")[0]
    if key == text or not re.fullmatch(r"[\w.]+", key):
        return None
    value = yaml.safe_load(text)[key]
    job: dict[str, Any] = {"source": ".", "entrypoint": "train.py", "num_nodes": 4, "output": "s3://my-bucket/runs"}
    if key in NEEDS_A_CLOUD:
        job |= {"target": "prod", "resources": {"accelerators": "A100:8"}}
    if value == "sagemaker-local":
        job["output"], job["image"] = "results", "python:3.12"
    if key == "compat":
        job["run"] = f"python {job.pop('entrypoint')}"
    for name in reversed(key.split(".")[1:]):
        value = {name: value}
    return {**job, key.split(".")[0]: value}


OUTPUTS = {"gcp": "gs://my-bucket/runs", "local": "results"}
NEEDS_A_CLOUD = ("parallelism", "image", "limits.max_cost", "limits.max_wait", "options.sagemaker.keep_alive_s")
NEEDS_A_CLOUD += ("resources.accelerators", "resources.instance_type", "resources.use_spot")


def test_what_the_tables_say_is_planned(project: Path, capsys: pytest.CaptureFixture[str]):
    checked = 0
    target = next(block.text for block in blocks(DOCS / "migrate" / "torchx.md") if block.title == "cloudtrain.toml")
    (project / "cloudtrain.toml").write_text(target)
    for page, text in cells():
        if text.startswith("cloudtrain "):
            parse(shlex.split(text)[1:])
        elif text.startswith("--"):
            parse(["plan", "train.py", *shlex.split(text)])
        elif job := job_with(text):
            (project / "job.yaml").write_text(yaml.safe_dump(job))
            assert main(["plan"]) == 0, (page, text, capsys.readouterr().err)
        else:
            continue
        checked += 1
    assert checked > 80


def test_each_backend_accepts_the_secrets_that_the_table_says(project: Path, capsys: pytest.CaptureFixture[str]):
    starts = [block.text for page in PAGES if page.parent.name == "start" for block in blocks(page)]
    (project / "cloudtrain.toml").write_text("".join(text for text in starts if text.startswith("[targets.")))
    targets = {
        "ssh": "pair",
        "slurm": "lab",
        "kubernetes": "cluster",
        "sagemaker": "prod",
        "vertex": "gcp",
        "akash": "market",
    }
    page = (DOCS / "how" / "secrets.md").read_text()
    head, _, *rows = (line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|"))
    checked = set()
    for source, _, *answers in rows:
        for backends, answer in zip(head[2:], answers, strict=False):
            for backend in re.findall(r"[a-z]+", backends) if answer in ("yes", "no") else ():
                output = "gs://my-bucket/runs" if backend == "vertex" else "s3://my-bucket/runs"
                words = [
                    "--set",
                    f"secrets.HF_TOKEN={source.strip('`').replace('NAME', 'HF_TOKEN')}",
                    "--set",
                    f"output={output}",
                ]
                code = main(["plan", "train.py", "-t", targets.get(backend, backend), "--gpus", "A100:8", *words])
                assert code == (0 if answer == "yes" else 2), (backend, source, capsys.readouterr().err)
                checked.add((backend, answer))
    assert len(checked) == 14


def test_the_bounds_of_a_wait_are_as_the_table_says(project: Path, capsys: pytest.CaptureFixture[str]):
    starts = [block.text for page in PAGES if page.parent.name == "start" for block in blocks(page)]
    (project / "cloudtrain.toml").write_text("".join(text for text in starts if text.startswith("[targets.")))
    text = (DOCS / "watching.md").read_text().partition("## What bounds the wait")[2].partition("## ")[0]
    table = {row[0]: row[1:] for line in text.splitlines() if len(row := line.strip("| ").split(" | ")) >= 2}

    def plan(target: str, *settings: str) -> dict[str, Any]:
        given = ["output=" + OUTPUTS.get(target, "s3://my-bucket/runs"), *settings]
        words = [word for setting in given for word in ("--set", setting)]
        assert main(["plan", "train.py", "-t", target, "--gpus", "A100:8", "--json", *words]) == 0, capsys.readouterr()
        return json.loads(capsys.readouterr().out)

    flex, spot = "options.vertex.strategy=FLEX_START", "resources.use_spot=true"
    for row, target, *settings in (
        ("SSH", "pair"),
        ("Slurm", "lab"),
        ("Kubernetes", "cluster"),
        ("SageMaker, spot", "prod", spot),
        ("SageMaker, on demand", "prod"),
        ("Vertex AI, `strategy: FLEX_START`", "gcp", flex),
        ("Vertex AI, other strategies", "gcp"),
        ("Akash", "market"),
        ("`local`", "local"),
    ):
        notes = plan(target, *settings, "limits.max_wait=30m")["notes"]
        words = ("limits.max_wait has no effect", "does not end a wait for machines")
        said = any(sentence in note for sentence in words for note in notes)
        assert said == ("the plan says so" in table[row][0]), (row, notes)
    stopping = [plan("prod", spot, *more)["request"]["StoppingCondition"] for more in ((), ("limits.max_wait=30m",))]
    waits = [each["MaxWaitTimeInSeconds"] - each["MaxRuntimeInSeconds"] for each in stopping]
    assert waits == [24 * 3600, 1800] and table["SageMaker, spot"][1] == "24 h"
    job = plan("gcp", flex, "limits.max_wait=30m")["request"]["customJob"]
    assert job["jobSpec"]["scheduling"]["maxWaitDuration"] == "1800s"
    jobs = [plan("cluster", *more)["request"]["manifests"][0] for more in ((), ("limits.max_wait=30m",))]
    waits = [job["spec"]["activeDeadlineSeconds"] for job in jobs]
    assert waits[0] - waits[1] == 23.5 * 3600 and table["Kubernetes"][1] == "24 h"


@pytest.mark.train
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("census")
def test_a_task_of_ones_own_is_trained_as_the_page_shows(project: Path, capsys: pytest.CaptureFixture[str]):
    def do(line: str) -> str:
        assert main(shlex.split(line)[1:]) == 0, (line, capsys.readouterr())
        return capsys.readouterr().out

    printed = []
    follow(DOCS / "how" / "own-task.md", project, lambda line: printed.append(do(line)) or printed[-1])
    assert re.search(r"data: 500 samples to train on, 100 held out", printed[-1])
    assert re.search(r"2 x cpu, strategy ddp.*, wrapper DistributedDataParallel", printed[-1])
    last = next(line for line in reversed(printed[-1].splitlines()) if "held-out loss" in line)
    assert float(last.rpartition("accuracy ")[2].split()[0]) > 0.9, last


@pytest.mark.train
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("census")
def test_a_model_is_trained_evaluated_tuned_and_compared(project: Path, capsys: pytest.CaptureFixture[str]):
    def do(line: str) -> str | None:
        if "arc_easy" in line:  # from the Hugging Face Hub
            return parse(shlex.split(line)[1:])
        assert main(shlex.split(line)[1:]) == 0, (line, capsys.readouterr())
        return capsys.readouterr().out

    page = RUN_AS_A_WHOLE
    for block in blocks(page):
        if block.title == "make_data.py":
            exec(block.text, {})  # as `python make_data.py`, in this folder
    follow(page, project, do)
    first, tuned = Run.find("first"), Run.find("tuned")
    before, after = (run.metrics("eval/test/loss") for run in (first, tuned))
    assert [row.step for row in before] == [20, 40] and [row.step for row in after] == [40]
    assert after[-1].value < before[-1].value - 0.5, "what it was tuned for is in the data"
    assert tuned.record.job["inputs"]["model"]["run"] == first.run_id
    main(["diff", "first", "tuned"])
    compared = next(line.split() for line in capsys.readouterr().out.splitlines() if "eval/test/loss" in line)
    assert [float(text) for text in compared[1:]] == pytest.approx([before[-1].value, after[-1].value], rel=1e-4)
    python = next(block.text for block in blocks(page) if block.kind == "python" and not block.title)
    exec(python, {})
    assert capsys.readouterr().out.strip() == str(before[-1].value)
