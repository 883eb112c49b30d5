"""What importing much at once leaves behind: nothing; the collector and pydantic's plugins are as before."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.importing import DISABLE_PLUGINS, Quickly
from tests.conftest import WAIT_S

LOOK = """
import gc, importlib.metadata, os, sys
entry_points, importlib.metadata.entry_points = importlib.metadata.entry_points, None
from cloudtrain import Submitter
plan = Submitter(watch=False).plan({"entrypoint": "train.py"})
assert gc.isenabled() and "PYDANTIC_DISABLE_PLUGINS" not in os.environ, "somebody else's models have their plugins"
import pydantic
from pydantic.plugin import _loader
_loader.entry_points = entry_points
pydantic.create_model("Theirs", number=(int, 1))
assert _loader._plugins is not None, "they were looked for"
print(plan.backend)
"""


def test_a_plan_looks_for_no_plugins_and_the_next_model_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    done = subprocess.run([sys.executable, "-c", LOOK], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout == "local\n", done.stderr


@pytest.mark.parametrize("before", [None, "logfire-plugin"])
def test_the_collector_and_the_setting_are_as_before(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv(DISABLE_PLUGINS, raising=False)
    if before is not None:
        monkeypatch.setenv(DISABLE_PLUGINS, before)
    with pytest.raises(ZeroDivisionError), Quickly():
        assert not gc.isenabled() and os.environ[DISABLE_PLUGINS] == "__all__"
        1 / 0  # noqa: B018
    assert gc.isenabled() and os.environ.get(DISABLE_PLUGINS) == before
    gc.disable()
    try:
        with Quickly(), Quickly():
            pass
        assert not gc.isenabled() and os.environ.get(DISABLE_PLUGINS) == before
    finally:
        gc.enable()


def test_contexts_that_overlap_leave_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of two threads: the second one begins in the first one and ends after it."""
    monkeypatch.delenv(DISABLE_PLUGINS, raising=False)
    first, second = Quickly(), Quickly()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert not gc.isenabled() and os.environ[DISABLE_PLUGINS] == "__all__"
    second.__exit__()
    assert gc.isenabled() and DISABLE_PLUGINS not in os.environ
