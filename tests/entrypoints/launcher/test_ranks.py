"""What the ranks of a node leave behind when they end; their pipes are files that never end."""

from __future__ import annotations

import os

from launcher.log import CHUNK, Splitter
from launcher.loop import Loop
from launcher.masks import Masks
from launcher.ranks import MOST_READS, Ranks, _Rank


class Lines:
    """A log that counts how often it is written to."""

    def __init__(self) -> None:
        self.writes, self.masks = 0, Masks()

    def lines(self, rank: int, lines: list[bytes]) -> None:
        self.writes += 1
        assert self.writes <= 2 * MOST_READS, "it reads for ever"


def ended(pid: int, log: Lines) -> tuple[Ranks, _Rank]:
    ranks = Ranks(Loop(), log, lambda *_: None)
    rank = _Rank(0, pid, os.open("/dev/zero", os.O_RDONLY), Splitter(log), False)
    ranks._ranks.append(rank)
    ranks._by_pid[pid] = rank
    return ranks, rank


def test_a_child_that_prints_for_ever_does_not_keep_the_supervisor():
    assert CHUNK * MOST_READS >= 1 << 20, "all that a pipe holds"
    ranks, rank = ended(7, Lines())
    ranks.read(0)
    assert rank.pipe >= 0
    os.close(rank.pipe)


def test_groups_of_ranks_that_have_ended_are_forgotten():
    ranks, rank = ended(7, Lines())
    ranks.forget()
    assert ranks.groups == (7,), "it runs"
    ranks.reap([(7, 0)])
    ranks.forget()
    assert ranks.groups == () and rank.pipe == -1
