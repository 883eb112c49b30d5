"""What importing much at once leaves behind: nothing; the collector and pydantic's plugins are as before."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.importing import PLUGINS, Quickly
from tests.conftest import WAIT_S

LOOK = f"""
import gc, sys
from cloudtrain import Submitter
plan = Submitter(watch=False).plan({{"entrypoint": "train.py"}})
assert gc.isenabled() and {PLUGINS!r} not in sys.modules, "somebody else's models have their plugins"
assert "importlib.metadata" not in sys.modules, "the installed packages were looked through"
import pydantic
pydantic.create_model("Theirs", number=(int, 1))
assert sys.modules[{PLUGINS!r}].__file__
print(plan.backend)
"""


def test_a_plan_looks_for_no_plugins_and_the_next_model_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    done = subprocess.run([sys.executable, "-c", LOOK], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout == "local\n", done.stderr


def test_the_collector_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, PLUGINS, raising=False)
    with pytest.raises(ZeroDivisionError), Quickly():
        assert not gc.isenabled() and sys.modules[PLUGINS].get_plugins() == ()
        1 / 0  # noqa: B018
    assert gc.isenabled() and PLUGINS not in sys.modules
    gc.disable()
    try:
        with Quickly(), Quickly():
            pass
        assert not gc.isenabled() and PLUGINS not in sys.modules
    finally:
        gc.enable()
