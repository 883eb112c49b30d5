"""What ranks have in common: the world, what is decided together, the versions."""

from __future__ import annotations

import pytest

from tests.entrypoints.training import ENTRYPOINTS

from trainer import collectives, strategies  # isort: skip
from trainer.errors import Unsupported, check_versions  # isort: skip

assert ENTRYPOINTS


def test_the_world_is_looked_at():
    strategies.check_world(1, 1)
    with pytest.raises(Unsupported, match="the job has 2 processes, but 1 work together here"):
        strategies.check_world(1, 2)


def test_alone_everything_is_agreed_at_once():
    agreement = collectives.Agreement()
    assert agreement.settle(False, True) == (False, True) and agreement.settle(True, False) == (True, False)
    assert agreement.close() == (False, False)
    assert collectives.from_rank_0(lambda: 3) == 3 and collectives.every_rank("x") == ["x"]
    assert collectives.world_size() == 1 and collectives.leave(3) == 3
    collectives.check_same("thing", "a")


def test_old_and_absent_libraries_are_told(monkeypatch: pytest.MonkeyPatch):
    from trainer import errors

    check_versions()
    monkeypatch.setitem(errors.NEEDED, "torch", "99.0.0")
    with pytest.raises(Unsupported, match=r"needs torch 99\.0\.0 or newer, here is "):
        check_versions()
    monkeypatch.setitem(errors.NEEDED, "torch", "2.0")
    monkeypatch.setitem(errors.NEEDED, "no-such-library", "1")
    with pytest.raises(Unsupported, match="no-such-library is not installed"):
        check_versions()
