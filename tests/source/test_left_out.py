"""What the source's text names, is there, and is not sent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.errors import BadSource
from cloudtrain.runs.submit import Submitter
from cloudtrain.source.files import list_files
from cloudtrain.source.limits import MAX_FILE
from cloudtrain.source.texts import Texts
from cloudtrain.source.texts import mentions as mentions_of
from tests.conftest import WAIT_S
from tests.source.trees import repository


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "data").mkdir(parents=True)
    (folder / "train.py").write_text(
        "import sys\nrows = open('data/train.csv').read()\nconfig = open('config.yaml')\nprint('a/b', './nope.txt')\n"
    )
    (folder / "config.yaml").write_text("table: data/train.csv\n")
    (folder / "data" / "train.csv").write_text("a,b\n")
    (folder / ".gitignore").write_text("data/\n*.secret\n")
    (folder / "x.secret").write_text("1")
    repository(folder)
    return folder


def mentions(source: Path, words: list[str] | None = None) -> list[str]:
    return mentions_of(Texts(source, [file.path for file in list_files(source)]), words or [])


def test_an_ignored_file_that_the_text_names(source: Path):
    [sentence] = mentions(source)
    assert sentence.startswith("data/train.csv is not sent: ") and "ignore" in sentence
    assert sentence.endswith("a line !data/train.csv in .cloudtrainignore sends it")
    (source / ".cloudtrainignore").write_text("!data/train.csv\n")
    assert mentions(source) == []


def test_arguments_name_files_too_and_folders(source: Path):
    (source / "train.py").write_text("print(1)\n")
    assert mentions(source, ["--lr", "1e-4", "x.secret"])[0].startswith("x.secret is not sent")
    [sentence] = mentions(source, ["data"])
    assert "a line !data/** in .cloudtrainignore sends it" in sentence
    for name in ("/etc/passwd", "../source/data", ".git/config", "", "train.py", "nope", "~/x", "a\0b"):
        assert mentions(source, [name]) == [], name


def test_what_is_too_large_for_a_source_is_an_input(source: Path):
    with (source / "data" / "train.csv").open("r+b") as stream:
        stream.truncate(MAX_FILE + 1)  # a hole
    for words in ([], ["data"]):
        for sentence in mentions(source, words):
            assert "use inputs: in the job" in sentence and "sends it" not in sentence


def test_the_plan_says_it(source: Path, home: Path):
    plan = Submitter().plan({"name": "x", "source": str(source), "entrypoint": "train.py"})
    assert [note for note in plan.notes if "data/train.csv is not sent" in note]


def test_the_verdict_of_the_missing_file_says_it(source: Path, home: Path, census: Path):
    command = [sys.executable, "-m", "cloudtrain", "submit", "train.py", "-f"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1 and "FileNotFoundError" in done.stdout
    shown = subprocess.run(
        [*command[:3], "show"], cwd=source, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert "!data/train.csv in .cloudtrainignore sends it" in " ".join(shown.stdout.split())


def test_a_link_out_of_the_source_says_what_to_write(source: Path, tmp_path: Path):
    (tmp_path / "big").mkdir()
    (source / "corpus").symlink_to(tmp_path / "big")
    with pytest.raises(BadSource) as refused:
        list_files(source)
    assert f"inputs: {{corpus: {tmp_path}/big}}" in str(refused.value.hint) and "{input:corpus}" in str(
        refused.value.hint
    )
