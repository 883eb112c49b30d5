"""What a job says of its logged objects is checked before a page shows it."""

from __future__ import annotations

import base64
import io
import struct

import pytest
from PIL import Image

from cloudtrain.console import logged
from cloudtrain.events import Event


def event(seq: int = 0, attempt: str = "r-a1", **data) -> Event:
    about = {
        "what": "text",
        "name": "n",
        "step": 1,
        "file": "f",
        "_rank": 0,
        "part": 0,
        "parts": 1,
        "shown": {"text": "x"},
    }
    return Event(attempt, 0, seq, "t", "media", about | data)


def image(form: str, size=(3, 2)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size).save(stream, format=form)
    return stream.getvalue()


def drawn(data: bytes) -> bool:
    return logged._image(base64.b64encode(data).decode(), "n") is not None


def test_parts_come_together_and_the_lowest_rank_is_shown():
    parts = [event(n, part=n, parts=3, shown=piece) for n, piece in enumerate(["a", "b", "c"])]
    assert logged.collect(parts)["text", "n"][0].content == "abc"
    assert logged.collect(parts[:2])["text", "n"][0].content is None, "one has not come yet"
    mixed = [event(1, _rank=2), event(2, _rank=1, step=5), event(3, _rank=1, step=6, attempt="r-a2")]
    assert [(one.rank, one.step, one.attempt) for one in logged.collect(mixed)["text", "n"]] == [
        (1, 5, "1"),
        (1, 6, "2"),
    ]


@pytest.mark.parametrize(
    "odd",
    [{"what": "svg"}, {"step": -1}, {"step": "1"}, {"step": True}, {"parts": 10**9}, {"parts": 0}, {"part": None}]
    + [{"_rank": 1 << 70}],
)
def test_events_that_do_not_fit_are_left_out(odd):
    assert logged.collect([event(**odd)]) == {}


def test_only_images_of_a_size_that_a_page_can_hold_are_drawn():
    assert drawn(image("PNG")) and drawn(image("JPEG"))
    assert logged._png_size(image("PNG")) == logged._jpeg_size(image("JPEG")) == (3, 2)
    bomb = image("PNG")
    assert not drawn(bomb[:16] + struct.pack(">II", 60_000, 60_000) + bomb[24:])
    huge = image("JPEG")
    at = huge.index(b"\xff\xc0")
    assert not drawn(huge[: at + 5] + struct.pack(">HH", 60_000, 60_000) + huge[at + 9 :])
    for other in (b"<svg onload=alert(1)>", b"GIF89a", b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"):
        assert not drawn(other)
    assert logged._image("no base64!", "n") is None and logged._image({"a": 1}, "n") is None


@pytest.mark.parametrize(
    "content",
    [{}, {"counts": [1], "edges": [0]}, {"counts": ["x"], "edges": [0, 1]}, {"counts": [1], "edges": [0, float("nan")]}]
    + [{"counts": [1] * 101, "edges": [0] * 102}, {"counts": [10**400], "edges": [0, 1]}],
)
def test_a_histogram_that_is_none_is_not_drawn(content):
    assert logged._histogram(content, "n") is None


@pytest.mark.parametrize("content", [{}, {"rows": 1, "columns": []}, {"rows": [1], "columns": []}])
def test_a_table_that_is_none_is_not_drawn(content):
    assert logged._table(content, "n") is None
