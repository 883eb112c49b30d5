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
named = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)


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


@named
def test_an_entry_is_well_formed(entry: Entry):
    assert entry.obtained in ("real", "rebuilt") and set(entry.backends) <= BACKENDS and entry.backends
    assert entry.versions and entry.end.keys() == {"state", "exit_code", "reason", "by", "failed_rank"}
    assert entry.end["state"] in STATES
    assert all("\n" not in text and rank >= -1 and node >= 0 for node, rank, text in entry.log)
    if entry.obtained == "real":
        assert entry.launch is not None and entry.thread is None and entry.script
        assert (HERE / entry.script).is_file() and Path(entry.script).parent.name == entry.part
    else:
        assert entry.script is None and entry.launch is None
        assert re.fullmatch(r"https://[\w.-]+/\S+", entry.thread or "") or (entry.part, entry.thread) == (
            "doubtful",
            None,
        )
        assert entry.part != "doubtful" or entry.hard, "a doubtful one says why it is"


@named
def test_a_label_points_at_what_is_there(entry: Entry):
    label = entry.label
    assert label.keys() == {"class", "deciding", "where", "rank", "change", "changes_results"}
    assert label["rank"] is None or label["rank"] == "any" or label["rank"] >= 0
    if entry.name == "unknown":
        assert label["deciding"] is None and label["where"] is None and label["change"] is None
    elif label["where"] == "reason":
        assert label["deciding"] in entry.end["reason"].split("\n")
    else:
        assert label["where"] == "log" and label["deciding"].strip()
        ranks = {rank for _, rank, text in entry.log if text == label["deciding"]}
        assert ranks and (not isinstance(label["rank"], int) or ranks & {label["rank"], -1})
    assert (label["changes_results"] is None) == (label["change"] is None)


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
