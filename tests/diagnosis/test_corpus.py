"""The corpus of failures holds what its README says: form, counts, the draw; and its scripts still fail as recorded."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.diagnosis.entries import CORPUS, HERE, PARTS, SHARE, Entry, draw, load
from tests.diagnosis.reproduction import alike, reproduce

ENTRIES = load()
REAL = [entry for entry in ENTRIES if entry.obtained == "real"]
BACKENDS = {"local", "ssh", "slurm", "sagemaker", "vertex", "kubernetes"}
STATES = {"FAILED", "TIMED_OUT", "PREEMPTED", "LOST"}
# A few that start no torch and need a second or less: the others run in `make test-long`.
FAST = (
    "bad-argument-unrecognized",
    "missing-file-open",
    "missing-module-late",
    "permission-execute",
    "signal-segv",
    "unknown-handled",
)


def classes() -> dict[str, str]:
    """Return the classes that README.md lists, with their sentences."""
    text = (HERE / "README.md").read_text(encoding="utf-8").partition("## Classes")[2]
    return dict(re.findall(r"^\| `([a-z0-9-]+)` \| (.+?) \|", text, re.M))


def test_there_are_enough_of_each_kind():
    assert len(ENTRIES) >= 150
    counts = Counter(entry.name for entry in ENTRIES)
    assert set(counts) == set(classes()), "README.md lists the classes, each with a sentence"
    assert min(counts.values()) >= 3, counts.most_common()[-3:]
    assert Counter(entry.obtained for entry in ENTRIES).keys() == {"real", "rebuilt"}
    assert sum(entry.hard is not None for entry in ENTRIES) >= 50


def test_the_parts_are_disjoint_and_as_drawn():
    drawn = json.loads((CORPUS / "drawn.json").read_text())
    ids = {part: {path.stem for path in (CORPUS / part).glob("*.json")} for part in PARTS}
    assert not ids["known"] & ids["held_out"]
    assert ids["held_out"] == draw(drawn), "what was set aside is what the seed says; later entries belong to known"
    assert drawn.items() <= {entry.id: entry.name for entry in ENTRIES}.items()
    assert len(drawn) / (SHARE + 0.5) <= len(ids["held_out"]) <= len(drawn) / (SHARE - 0.5)
    assert {drawn[name] for name in ids["held_out"]} == set(drawn.values()), "every class is among the set aside"


def test_entries_are_well_formed():
    """Reports all wrong entries at once, by their ids only: some are not to be read."""
    assert [entry.id for entry in ENTRIES if not is_well_formed(entry)] == []


def is_well_formed(entry: Entry) -> bool:
    form = (
        set(entry.backends) <= BACKENDS
        and bool(entry.backends and entry.versions)
        and entry.end.keys() == {"state", "exit_code", "reason", "by", "failed_rank"}
        and entry.end["state"] in STATES
        and all("\n" not in text and rank >= -1 and node >= 0 for node, rank, text in entry.log)
    )
    if entry.obtained == "real":
        made = entry.launch is not None and entry.thread is None and bool(entry.script)
        script = HERE / str(entry.script)
        return form and made and script.is_file() and script.parent.name == entry.part
    made_up = (entry.part, entry.thread) == ("doubtful", None)
    return (
        form
        and entry.obtained == "rebuilt"
        and entry.script is None
        and entry.launch is None
        and (made_up or re.fullmatch(r"https://[\w.-]+/\S+", entry.thread or "") is not None)
        and (entry.part != "doubtful" or bool(entry.hard))  # a doubtful one says why it is
    )


def test_labels_point_at_lines_of_their_entries():
    assert [entry.id for entry in ENTRIES if not has_right_label(entry)] == []


def has_right_label(entry: Entry) -> bool:
    label = entry.label
    form = (
        label.keys() == {"class", "deciding", "where", "rank", "change", "changes_results"}
        and (label["rank"] is None or label["rank"] == "any" or label["rank"] >= 0)
        and (label["changes_results"] is None) == (label["change"] is None)
    )
    if entry.name == "unknown":
        return form and label["deciding"] is None and label["where"] is None and label["change"] is None
    if label["where"] == "reason":
        return form and label["deciding"] in entry.end["reason"].split("\n")
    ranks = {rank for _, rank, text in entry.log if text == label["deciding"]}
    rank_is_right = not isinstance(label["rank"], int) or bool(ranks & {label["rank"], -1})
    return form and label["where"] == "log" and bool(label["deciding"].strip()) and bool(ranks) and rank_is_right


def test_no_script_is_left_over():
    scripts = {str(path.relative_to(HERE)) for path in (HERE / "scripts").rglob("*.py")}
    assert scripts == {entry.script for entry in REAL}


def test_nothing_of_the_machine_that_made_it_is_left():
    for path in sorted(CORPUS.rglob("*.json")):
        assert not re.search(r"/work/|/root/|\.pyenv|/tmp/tmp|pytest-of", path.read_text(encoding="utf-8")), path.name


@pytest.mark.parametrize(
    "entry",
    [pytest.param(entry, id=entry.id, marks=[] if entry.id in FAST else pytest.mark.long) for entry in REAL],
)
def test_a_script_fails_again_as_recorded(entry: Entry, tmp_path: Path):
    assert entry.script is not None and entry.launch is not None
    log, end = reproduce((HERE / entry.script).read_text(encoding="utf-8"), entry.launch, tmp_path)
    assert (end["state"], end["exit_code"], end["by"]) == tuple(
        entry.end[name] for name in ("state", "exit_code", "by")
    )
    if isinstance(entry.label["rank"], int):
        assert end["failed_rank"] == entry.end["failed_rank"]
    if (deciding := entry.label["deciding"]) is None:
        recorded = {alike(text) for _, _, text in entry.log}
        assert {alike(text) for _, _, text in log} <= recorded, "a rank that is ended may not have spoken yet"
    elif entry.label["where"] == "reason":
        assert alike(deciding) in alike(end["reason"])
    else:
        assert alike(deciding) in {alike(text) for _, _, text in log}, "\n".join(str(line) for line in log)
