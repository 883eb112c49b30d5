"""One start of a run for each number: creation, records that cannot be read, and the chain of starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launcher import fence


@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_created_once_and_nothing_else_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool):
    def refuse(*_: object) -> None:
        raise PermissionError

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path = str(tmp_path / "00000001.json")
    assert fence.create(path, "mine") and not fence.create(path, "yours")
    assert Path(path).read_text() == "mine" and os.listdir(tmp_path) == ["00000001.json"]


def test_a_faster_start_gets_the_number_and_the_next_looks_again(tmp_path: Path):
    asked = []

    def describe(given: int) -> tuple[int, dict[str, int]]:
        asked.append(given)
        number = given or fence.newest(str(tmp_path)) + 1
        if len(asked) == 1:
            fence.create(fence.path_of(str(tmp_path / fence.FOLDER), number), "{}")
        return number, {"step": number}

    assert fence.claim(str(tmp_path), 4, describe) == 5 and asked == [4, 0]
    assert fence.records(str(tmp_path)) == {4: {}, 5: {"step": 5}}


def test_records_that_cannot_be_read_still_take_their_number(tmp_path: Path):
    folder = tmp_path / fence.FOLDER
    folder.mkdir()
    texts = {
        "00000001.json": '{"epoch": 1}',
        "00000002.json": '{"ep',
        "00000003.json": "[]",
        "x.json": "{}",
        "00000009": "",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "00000004.json").write_text("[" * 100_000)
    assert fence.records(str(tmp_path)) == {1: {"epoch": 1}, 2: {}, 3: {}, 4: {}}
    assert fence.newest(str(tmp_path)) == 4 and fence.numbers(os.listdir(folder), ending="") == [9]
    assert fence.records(str(tmp_path / "none")) == {} and fence.newest(str(tmp_path / "none")) == 0


@pytest.mark.parametrize(
    ("starts", "origins", "limits"),
    [
        ([], {}, {}),
        ([1, 2], {1: (0, 0), 2: (1, 3)}, {2: float("inf"), 1: 3}),
        ([1, 2, 3], {2: (1, 3), 3: (1, 3)}, {3: float("inf"), 1: 3}),  # the second is outside
        ([1, 2], {2: (0, 0)}, {2: float("inf")}),  # it resumed from nothing
        ([1, 3], {3: None}, {3: float("inf"), 1: float("inf")}),  # it is not known from where
        ([2], {2: (2, 3)}, {2: float("inf")}),  # it points at itself
    ],
)
def test_the_history(starts: list[int], origins: dict, limits: dict):
    assert fence.history(starts, origins) == limits


def test_a_name_whose_digits_are_no_number_is_passed_over():
    """Others write into a shared folder of checkpoints, and int() refuses some digits."""
    assert fence.numbers(["00000002.json", "².json", "x.json"]) == [2]
