"""The notebook page in a real kernel of Jupyter: its cells run, its outputs are those of the page, the card is live."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.lab.environments import make_environment
from tests.lab.sdk import NEEDED, ROOT
from tests.test_task_pages import DOCS, SCRIPT, blocks

JUPYTER = ["nbclient==0.11.0", "ipykernel==7.4.0", "cloudpickle==3.1.2"]
PROGRAM = """
import json, sys
import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(text) for text in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
print(json.dumps([cell.outputs for cell in notebook.cells]))
"""
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("census")]


def test_the_cells_of_the_page_run_in_a_kernel(home: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    cells = [block.text for block in blocks(DOCS / "start" / "notebook.md") if block.kind == "python"]
    first, again, _, function, *_ = cells
    done = subprocess.run(
        [make_environment("jupyter", [*JUPYTER, *NEEDED]), "-c", PROGRAM],
        input=json.dumps([first, again, function, "call"]),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    followed, newest, values, card = json.loads(done.stdout.splitlines()[-1])
    assert "SUCCEEDED 0.0003" in "".join(output.get("text", "") for output in followed)
    assert [output["text"] for output in values if "text" in output] == ["8 [2, 4, 6]\n"]
    for shown in (newest, card):
        assert "SUCCEEDED" in "".join(output["data"].get("text/html", "") for output in shown if "data" in output)
