"""What a plan says about the packages of a function: those that it imports and that its nodes may lack."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import cloudtrain
from cloudtrain.functions.packages import imported


def trains(x):
    from json import dumps

    import not_anywhere.inner

    return yaml.safe_dump([dumps(x), not_anywhere.inner])


trains.__module__ = "__main__"  # as in a script: it travels by value
LACKS = "trains imports not_anywhere"


def notes_on(target: str, home: Path, **job: object) -> str:
    given = {"output": "s3://bucket/runs", **job} if target == "kubernetes" else job
    notes = cloudtrain.function(trains, target=target, home=home, **given).plan(1).notes
    return notes[0] if notes else ""


def test_this_machine_says_what_its_python_does_not_have(home: Path):
    note = notes_on("local", home)
    assert note.startswith(f"{LACKS}, which ") and "yaml" not in note


def test_a_node_that_is_not_known_needs_all_of_them(home: Path):
    expected = f"{LACKS}, yaml, and the job has no requirements file: its nodes must have them"
    assert notes_on("kubernetes", home, image="registry/train:1") == expected


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("pyyaml>=6 # by another name\n", "not_anywhere"),
        ("PyYAML\nNot.Anywhere[more]==1\n", ""),
        ("-r other.txt\n", ""),
    ],
)
def test_requirements_name_packages_and_not_modules(home: Path, tmp_path: Path, text: str, lacks: str):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "requirements.txt").write_text(text)
    note = notes_on("kubernetes", home, image="registry/train:1", source=str(tmp_path / "source"))
    expected = f"trains imports {lacks}, which requirements.txt does not name: its nodes must have them"
    assert note == expected if lacks else "imports" not in note


def test_a_set_up_command_may_install_them(home: Path):
    assert "imports" not in notes_on("local", home, setup="pip install .")


def test_a_module_that_travels_as_source_is_looked_at_whole(module):
    module("kit.other", "import yaml\n\ndef help(): import pandas_nope\n")
    tasks = module(
        "kit.tasks",
        "import os, pytest\nfrom . import other\ndef add(a):\n    from .more import b\n    import kit.other\n    return a\n",
    )
    assert imported(tasks.add, whole_module=True) == {"pytest", "yaml", "pandas_nope"}
    assert imported(tasks.add, whole_module=False) == set()


def test_what_a_function_captures_counts(module):
    own = module("own", "import yaml\nclass Model:\n    def run(self):\n        import numpy\n        return yaml\n")
    model = own.Model()

    def call():
        return model.run()

    assert imported(call, whole_module=False) == {"yaml", "numpy"}
    assert imported(model.run, whole_module=False) == {"yaml", "numpy"}
