"""Watchers over whole histories: whatever dies, hangs or is not reached, no run is lost, and nothing counts twice.

No call of a platform is made with the credentials of another run's shell.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.world import laboratory, live

EACH = 150


def live_through(seeds: range, folder: Path) -> None:
    with laboratory(folder) as lab:
        worlds = [live(seed, lab) for seed in seeds]
    assert sum(world.deaths for world in worlds) > len(seeds) // 3, "processes died"
    assert sum(len(world.sent) for world in worlds) > len(seeds), "attempts followed"
    assert sum(world.helpers for world in worlds) > len(seeds) // 3, "runs of two accounts in one home"


def test_no_run_is_lost_whatever_happens_to_watchers(quick_folder: Path):
    live_through(range(EACH), quick_folder)


@pytest.mark.long
@pytest.mark.parametrize("block", range(20))
def test_ten_thousand_runs_are_not_lost(quick_folder: Path, block: int):
    live_through(range(500 * block, 500 * (block + 1)), quick_folder)
