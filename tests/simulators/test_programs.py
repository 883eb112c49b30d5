"""The simulators are programs of their own, which say how they are started."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from cloudtrain import simulators

PROGRAMS = sorted(path.parent.name for path in Path(simulators.__file__).parent.glob("*/__main__.py"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_simulator_says_how_it_is_started(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"cloudtrain.simulators.{name}", run_name="__main__")
    assert ended.value.code == 0 and f"usage: python -m cloudtrain.simulators.{name}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [], "nothing was served"
