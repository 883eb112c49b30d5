"""What the pages say of places: where a run's files are in its output, and where a platform gets the source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cloudtrain.cli import main
from tests.test_task_pages import DOCS, PAGES, blocks, project

__all__ = ["project"]  # a fixture


@pytest.mark.usefixtures("census")
def test_the_page_has_every_folder_of_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.py").write_text("print({'step': 1, 'loss': 2.0})\n")
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "runs"
    assert main(["submit", "train.py", "--wait", "--set", f"output={output}", "--set", "audit=true"]) == 0
    (shown,) = (block.text for block in blocks(DOCS / "how" / "attach.md") if block.text.startswith("<output>"))
    (run,) = (path for path in output.iterdir() if not path.name.startswith("."))
    names = [*(path.name for path in output.glob(".*")), *(path.name for path in run.iterdir())]
    assert {"run.json", "audit", "source", ".index"} <= set(names)
    assert [name for name in names if f"/{name}" not in shown and f" {name}/" not in shown] == []


@pytest.mark.parametrize(("target", "scheme", "folder"), [("prod", "s3", "code"), ("gcp", "gs", "src")])
def test_the_pages_name_where_the_source_goes(
    project: Path, capsys: pytest.CaptureFixture[str], target: str, scheme: str, folder: str
):
    starts = [block.text for page in PAGES if page.parent.name == "start" for block in blocks(page)]
    (project / "cloudtrain.toml").write_text("".join(text for text in starts if text.startswith("[targets.")))
    words = ["-t", target, "--gpus", "A100:8", "--set", f"output={scheme}://my-bucket/runs", "--json"]
    assert main(["plan", "train.py", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert f"cloudtrain/{folder}/{plan['bundle']['sha256']}" in json.dumps(plan["request"]), "cloudtrain is the prefix"
    for page in ("leaves.md", "clean.md"):
        assert f"`{scheme}://BUCKET/PREFIX/{folder}/`" in (DOCS / "how" / page).read_text()


@pytest.mark.usefixtures("census")
def test_a_folder_of_another_run_is_replaced_as_the_page_says(project: Path, capsys: pytest.CaptureFixture[str]):
    page = " ".join((DOCS / "how" / "fetch.md").read_text().split())
    (project / "train.py").write_text(
        "import os\nopen(os.environ['CLOUDTRAIN_MODEL_DIR'] + '/weight.txt', 'w').write('1')\n"
    )
    for name in ("first", "second"):
        assert main(["submit", "train.py", "--name", name, "--wait"]) == 0
    assert main(["fetch", "first", "-o", "best"]) == 0 and main(["fetch", "second", "-o", "best"]) == 2
    assert "best already has files fetched from first" in capsys.readouterr().err
    assert "`best already has files fetched from ...`" in page and "delete the folder `best` and fetch again" in page
    shutil.rmtree(project / "best")
    assert main(["fetch", "second", "-o", "best"]) == 0
