from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cloudtrain

NAMES = [
    "CloudtrainError", "DistributedTraining", "Job", "Run", "RunFailed", "State", "Status", "Submitter", "Sweep",
    "__version__", "attach", "function", "runs", "submit",
]  # fmt: skip


def test_public_names():
    assert cloudtrain.__all__ == NAMES
    assert set(NAMES) <= set(dir(cloudtrain))
    for name in NAMES:
        assert getattr(cloudtrain, name) is not None


def test_no_public_function_bears_the_name_of_its_module():
    from importlib import import_module

    for name, module in cloudtrain._HOME.items():
        if name == module:  # `runs` is a package that can be called, so that both names are the same thing
            assert callable(import_module(f"cloudtrain.{module}"))
            continue
        assert getattr(import_module(f"cloudtrain.{module}"), name) is getattr(cloudtrain, name)
        assert not (Path(cloudtrain.__file__).parent / name).exists()


def test_public_names_have_docstrings():
    for name in NAMES:
        if name != "__version__":
            assert (getattr(cloudtrain, name).__doc__ or "").strip(), name


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cloudtrain.nothing  # noqa: B018


def test_import_is_light():
    code = "import sys; before = set(sys.modules); import cloudtrain; print(*sorted(set(sys.modules) - before))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in shown if name.startswith("cloudtrain")] == ["cloudtrain"]
    assert {name.split(".")[0] for name in shown} <= {"cloudtrain", "__future__"}
