"""Images, texts, tables and histograms of a script: their files, and events of limited size that the console can read."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import cloudtrain_media as media
import cloudtrain_runtime as runtime
import numpy
import pytest
from PIL import Image

from cloudtrain import events
from cloudtrain.console.logged import collect
from cloudtrain.events import Event


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that gives what was logged: name -> content, and the folder of the files."""
    monkeypatch.setenv("CLOUDTRAIN_OUTPUT_DIR", str(tmp_path / "outputs"))
    monkeypatch.setattr(media, "_calls", 0)
    monkeypatch.setattr(media, "_bytes", 0)

    def read() -> tuple[dict, Path]:
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line.encode()) <= events.MAX_BYTES for line in lines)
        parsed = [events.parse(line) for line in lines]
        assert None not in parsed
        found = collect(Event("r-a1", 0, n, "t", *told) for n, told in enumerate(parsed) if told[0] == "media")
        return {name: objects[-1].content for (_, name), objects in found.items()}, tmp_path / "outputs" / "logged"

    return read


def test_an_image_is_whole_in_its_file_and_small_in_its_events(logged):
    noise = numpy.random.default_rng(0).integers(0, 256, (600, 500, 3), dtype=numpy.uint8)
    runtime.log_image("samples/α", noise, step=3)
    runtime.log_image("grey", numpy.linspace(0, 1, 64).reshape(8, 8), step=3)
    runtime.log_image("channels first", numpy.moveaxis(noise, 2, 0)[:, :20, :30], step=3)
    runtime.log_image("pil", Image.fromarray(noise), step=3)
    runtime.log_image("bytes", base64.b64decode(_PIXEL), step=3)
    shown, folder = logged()
    sizes = {name: Image.open(io.BytesIO(base64.b64decode(content))).size for name, content in shown.items()}
    assert sizes["grey"] == (8, 8) and sizes["channels first"] == (30, 20) and sizes["bytes"] == (1, 1)
    assert max(len(content) for content in shown.values()) <= 4 / 3 * media.MOST_SHOWN + 4
    assert 10 < sizes["samples/α"][0] < 500 and 10 < sizes["pil"][0] < 500
    whole = numpy.asarray(Image.open(folder / "samples_-00000003-1.png"))
    assert (whole == noise).all() and len(list(folder.iterdir())) == 5
    for odd in (numpy.zeros((5, 5, 2)), [[1, 2], [3]], object(), "nothing.png", b"<svg/>"):
        with pytest.raises((ValueError, TypeError, OSError)):
            runtime.log_image("odd", odd, step=1)


def test_texts_and_tables_are_cut_in_events_and_whole_in_files(logged):
    runtime.log_text("sample", "ü\n" * 5000, step=1)
    runtime.log_table("rows", [{"a": n, "b": "x" * 100} for n in range(1000)], step=1)
    runtime.log_table(
        "cells", [[1, None, True], [numpy.float32(0.5), Path("p"), "<b>"]], columns=["a", "b", "c"], step=1
    )
    shown, folder = logged()
    text, rows = shown["sample"], shown["rows"]
    assert text["text"] + "x" * text["left_out"] != "" and len(text["text"]) + text["left_out"] == 10_000
    assert rows["columns"] == ["a", "b"] and len(rows["rows"]) + rows["left_out"] == 1000 and len(rows["rows"]) > 10
    assert shown["cells"] == {"columns": ["a", "b", "c"], "rows": [[1, None, True], [0.5, "p", "<b>"]], "left_out": 0}
    assert (folder / "sample-00000001-1.txt").read_text() == "ü\n" * 5000
    assert len(json.loads((folder / "rows-00000001-2.json").read_text())["rows"]) == 1000


def test_a_histogram_counts_finite_numbers(logged):
    runtime.log_histogram("weights", numpy.array([[0.0, 1.0], [1.0, numpy.nan]]), step=1, bins=2)
    runtime.log_histogram("flat", [2.0, 2.0], step=1, bins=4)
    runtime.log_histogram("empty", [], step=1, bins=4)
    shown, _ = logged()
    assert shown["weights"] == {"counts": [1, 2], "edges": [0.0, 0.5, 1.0], "left_out": 1}
    assert sum(shown["flat"]["counts"]) == 2 and shown["empty"]["counts"] == [0] * 4


def test_how_much_is_logged_is_limited(logged, monkeypatch):
    monkeypatch.setattr(media, "MOST_CALLS", 3)
    monkeypatch.setattr(media, "MOST_IN_EVENTS", (300, 100))
    for step in range(6):
        runtime.log_text("t", "x" * 150, step=step)
    shown, folder = logged()
    assert shown["t"] == "" and len(list(folder.iterdir())) == 3
    monkeypatch.setattr(media, "_calls", 0)
    monkeypatch.setattr(media, "MOST_FILE", 10)
    with pytest.raises(ValueError, match="at most 10 are allowed"):
        runtime.log_text("t", "x" * 150, step=1)


def test_another_rank_has_files_and_curves_of_its_own(logged, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    runtime.log_text("t", "of rank 3", step=1)
    shown, folder = logged()
    assert shown["t"]["text"] == "of rank 3" and [path.name for path in folder.iterdir()] == ["t-00000001-rank-3-1.txt"]
    runtime.log_metrics(step=1, loss=0.5, epoch=0.25)
    assert events.parse(capsys.readouterr().out.strip()) == (
        "metric", {"step": 1, "_rank": 3, "loss": 0.5, "epoch": 0.25}
    )  # fmt: skip


_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
