"""The log of a run as numbered lines: what is searched in pieces is what a look at every line finds."""

from __future__ import annotations

import pytest

from cloudtrain.console import logbook
from cloudtrain.console.logbook import LineFilter, Logbook
from cloudtrain.runs.submit import Submitter

TALK = """
for n in range(300):
    print(f"Line {n} " + "ÄÖ x"[n % 4] * (n % 37) + " End")
"""


@pytest.mark.parametrize("piece", [1, 64, 1000, 4 << 20])
def test_a_search_in_pieces_finds_what_every_line_tells(book, monkeypatch, piece):
    monkeypatch.setattr(logbook, "SEARCH_BYTES", piece)
    lines, total = book.window(LineFilter(), 0, 1000)
    assert total == len(lines) == book.count >= 300
    for words in ("line 29", "LINE 299 ", "xxxx end", "Ö", "e", "nothing of the kind"):
        expected = [
            line.number for line in lines if words.encode().lower() in f"{line.at} {line.text}".encode().lower()
        ]
        for half in (book.count // 2, book.count):  # as when the rest came later
            found = logbook.Matches()
            found.lines.extend(book._search(words, 0, half))
            found.lines.extend(book._search(words, half, book.count))
            assert list(found.lines) == expected, words


def test_a_window_of_what_was_found(book):
    lines, total = book.window(LineFilter(text="line 29"), -3, 200)
    assert (total, [line.text.split()[1] for line in lines]) == (11, ["297", "298", "299"])


def test_a_line_has_the_number_that_logs_prints(book):
    lines, _ = book.window(LineFilter(), 0, 1000)
    first = lines[0].seq
    assert first > 1, "events have numbers too"
    assert [line.seq for line in lines] == sorted({line.seq for line in lines})
    assert all(book.find(line.seq, line.node) == line.number for line in lines)
    assert book.find(1, None) == 0 and book.find(10**9, 0) == book.find(1, 7) == book.count - 1


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Logbook:
    folder = tmp_path_factory.mktemp("book")
    (folder / "train.py").write_text(TALK)
    job = {"name": "talk", "source": str(folder), "entrypoint": "train.py", "env": {"PYTHONIOENCODING": "utf-8"}}
    run = Submitter("local", home=folder / "home").submit(job)
    run.wait(120)
    found = Logbook(run.run_id)
    found.read_on(run.store)
    return found
