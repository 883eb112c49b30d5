"""What each backend must do that deletes what its attempts have left."""

from __future__ import annotations

from typing import Any

from cloudtrain.events import State


def check_removal(contract: Any, backend: Any, handle: str) -> None:
    """Let an attempt end, and delete what it has left, twice."""
    assert contract.until_final(backend, handle).state is State.SUCCEEDED
    assert backend.remains(handle)
    for _ in range(2):
        backend.remove(handle)
        assert backend.remains(handle) == {}
    assert backend.status(handle).state is State.LOST
    contract.assert_no_leftovers(handle)
