"""A script of the user's own is not started with layers that nobody splits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.entrypoints.training import ENTRYPOINTS

from launcher.prepare import declared  # isort: skip
from launcher.errors import Refused  # isort: skip

assert ENTRYPOINTS


def test_an_axis_that_the_script_does_not_declare_is_refused(tmp_path: Path):
    (tmp_path / "own.py").write_text("import torch\n# tp_size would be nice\n")
    with pytest.raises(
        Refused, match=r"parallelism.tp_size is 2, but no code splits the model in own.py.*cloudtrain: tp_size"
    ):
        declared.check(["own.py", "--x"], {"tp_size": 2, "pp_size": 1}, str(tmp_path))
    declared.check(["own.py"], {"strategy": "ddp", "tp_size": 1}, str(tmp_path))
    declared.check([".cloudtrain/train.py"], {"tp_size": 2}, str(tmp_path))


def test_a_script_that_declares_it_runs(tmp_path: Path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__main__.py").write_text('"""Megatron."""\n# cloudtrain: tp_size, pp_size\n')
    declared.check(["-m", "pkg"], {"tp_size": 2, "pp_size": 2}, str(tmp_path))
    with pytest.raises(Refused, match="parallelism.cp_size is 2, but no code splits the model in -m pkg"):
        declared.check(["-m", "pkg"], {"tp_size": 2, "cp_size": 2}, str(tmp_path))
    with pytest.raises(Refused, match="-m elsewhere"):
        declared.check(["-m", "elsewhere"], {"tp_size": 2}, str(tmp_path))


def test_strategies_are_left_to_accelerate_unless_the_script_declares_them(tmp_path: Path):
    (tmp_path / "own.py").write_text("# cloudtrain: fsdp, tp_size\n")
    source = str(tmp_path)
    assert declared.left_to_accelerate(["own.py"], {"strategy": "zero2"}, source)
    assert not declared.left_to_accelerate(["own.py"], {"strategy": "fsdp"}, source)
    assert not declared.left_to_accelerate(["own.py"], {"strategy": "ddp"}, source)
    assert not declared.left_to_accelerate([".cloudtrain/train.py"], {"strategy": "zero2"}, source)
    assert declared.left_to_accelerate(["own.py"], {"strategy": "ddp", "accelerate_config": "a.yaml"}, source)
    declared.check(["own.py"], {"strategy": "fsdp", "tp_size": 2}, source)
    with pytest.raises(
        Refused, match=r"strategy zero2 of Accelerate cannot be combined with tp_size.*# cloudtrain: zero2 tp_size"
    ):
        declared.check(["own.py"], {"strategy": "zero2", "tp_size": 2}, source)
