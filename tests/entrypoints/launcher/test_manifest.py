"""The manifest arrives as it was sent, or is refused."""

from __future__ import annotations

import base64
import json
import zlib

import pytest
from launcher import manifest
from launcher.errors import Refused

from cloudtrain.backends.manifest import Manifest

MANIFEST = Manifest(
    run_id="r", attempt=2, argv=("a.py", "ü\n☃", ""), nodes=2, processes_per_node=3, env={"A": "x" * 9000 + "ß"}
)


# As version 53b05dd wrote it: bundles are stored with the launcher of their time, and this one reads what others wrote.
STORED = (
    "eNpVUMluwjAQ_Zc5OyQs4pBb_4FbiyLXGcAiXjozRkSIf-84VFV78mx-2wMsnW_Qv4OQ9XGVZzDQNBPps8VmB0cDVgRDFui3BtwF3TUnH7V9AN6Q"
    "5oF103UGrohZy6cBjLe6foMePkrXjSfQ4TkXHjLSENOI0K91Qtbh67sBH3MRrt8WJbUIyyG4tKgq5LXhbd-2n-0dngoZ7H2gEsWHF8y-ygg-LhS8"
    "cPxUGwOpiDL8QhR3RWkvKaBiZ0t2mnDyHCoxqwTB86zHJx5zVZ8pOWTGvxZ2Bgi_iicMGKv2f-1K7qLQqm_wo-7Ex7mZQrPZ65TREb7sHmr6mlh_"
    "gKMSsaiS6mYxowGzT5rG-vkNVEOLOg=="
)


def packed(**fields: object) -> list[str]:
    return [base64.urlsafe_b64encode(zlib.compress(json.dumps(fields).encode())).decode()]


def test_the_fields_are_the_manifests_own():
    fields = manifest.Manifest.__annotations__
    assert {*fields, "version"} == set(Manifest.__dataclass_fields__)
    found = manifest.decode(MANIFEST.encode())
    for name in (name for name in fields if not hasattr(manifest.Manifest, name)):  # the others are left out as default
        assert getattr(found, name) == MANIFEST.to_dict()[name]
    assert (found.attempt_id, found.world_size, found.fewest_nodes) == ("r-a2", 6, 2)


def test_pieces_come_in_order_of_their_numbers():
    env = {f"CLOUDTRAIN_MANIFEST_{number}": str(number) for number in reversed(range(12))} | {"OTHER": "x"}
    assert manifest.pieces(env) == [str(number) for number in range(12)]
    assert manifest.pieces({}) == []
    with pytest.raises(Refused, match="piece 1 is missing"):
        manifest.pieces({"CLOUDTRAIN_MANIFEST_0": "a", "CLOUDTRAIN_MANIFEST_2": "b"})


def test_pieces_come_as_hyperparameters_too():
    """SageMaker's SDK writes every value as JSON: a text is in quotes."""
    given = {f"ct_manifest_{number}": json.dumps(piece) for number, piece in enumerate(MANIFEST.encode())} | {
        "epochs": "3"
    }
    assert manifest.decode(manifest.pieces({}, json.dumps(given))).argv == list(MANIFEST.argv)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([], "there is no manifest"),
        (["***"], "damaged"),
        (["eJw"], "damaged"),
        (["ü"], "damaged"),
        (packed(version=5), "has version 5, this launcher reads versions up to 4"),
        (MANIFEST.encode()[:-1] + [MANIFEST.encode()[-1][:-40]], "damaged"),
        (packed(version=1, run_id="r"), "lacks attempt, argv"),
        ([base64.urlsafe_b64encode(zlib.compress(b"[]")).decode()], "damaged"),
    ],
)
def test_what_is_damaged_is_refused(pieces: list[str], reason: str):
    with pytest.raises(Refused, match=reason):
        manifest.decode(pieces)


def test_a_stored_manifest_of_an_older_version_is_read():
    found = manifest.decode([STORED])
    assert (found.attempt_id, found.argv, found.world_size) == ("tiny-lm-26-a3", ["train.py", "--lr", "3e-4"], 8)
    assert (found.fewest_nodes, found.parallelism, found.stall_s) == (1, {"strategy": "fsdp"}, 600.0)
    assert found.checkpoint == {"every_s": 300, "keep": 3} and found.inputs["train"] == {
        "uri": "s3://b/x",
        "mode": "copy",
    }
