from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain.backends.manifest import MAX_PIECE, Manifest
from cloudtrain.errors import BadRequest

text = st.text(st.characters(codec="utf-8"), max_size=60)


def manifest(**changes):
    return Manifest(
        **{"run_id": "run-1", "attempt": 2, "argv": ("train.py",), "nodes": 2, "processes_per_node": 4, **changes}
    )


@given(st.lists(text, max_size=8), st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), text, max_size=4))
def test_decode_is_the_inverse_of_encode(argv, env):
    before = manifest(argv=tuple(argv), env=env)
    pieces = before.encode()
    assert all(re.fullmatch(r"[A-Za-z0-9_=-]+", piece) for piece in pieces)
    assert Manifest.decode(pieces) == before


def test_pieces_are_short_and_in_order():
    import random

    noise = random.Random(1)
    before = manifest(argv=tuple(f"{noise.getrandbits(256):x}" for _ in range(300)))
    pieces = before.encode()
    assert len(pieces) > 3 and max(map(len, pieces)) <= MAX_PIECE
    assert Manifest.decode(pieces) == before
    with pytest.raises(BadRequest, match="damaged"):
        Manifest.decode(pieces[1:])
    with pytest.raises(BadRequest, match="damaged"):
        Manifest.decode(pieces[:-1])


def test_too_much_is_refused_with_its_size():
    import random

    noise = random.Random(1)
    with pytest.raises(BadRequest, match=r"take \d+,\d+ bytes packed, 65,536 are allowed; args has the most"):
        manifest(argv=tuple(f"{noise.getrandbits(512):x}" for _ in range(2000))).encode()


def test_another_version_is_refused():
    data = manifest().to_dict() | {"version": 99}
    with pytest.raises(BadRequest, match="version 99"):
        Manifest.from_dict(data)


def test_world_size_and_attempt_id():
    assert manifest().world_size == 8
    assert manifest().attempt_id == "run-1-a2"
    assert json.loads(json.dumps(manifest().to_dict()))["argv"] == ["train.py"]
