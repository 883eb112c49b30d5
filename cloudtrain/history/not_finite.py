"""Find where metrics of a run became NaN or infinite: the first such point of each curve, and its log line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudtrain.history.curves import of_rank
from cloudtrain.history.event_files import FIRST_SEQ
from cloudtrain.history.migrations import BLOCK

if TYPE_CHECKING:
    from cloudtrain.history.store import Store


@dataclass(frozen=True)
class NotFinite:
    """The first value of a curve that is NaN or infinite. `line` of node `node` of the log has it; None where no line has."""

    name: str
    rank: int
    step: int
    attempt: int
    node: int
    line: int | None
    last: bool  # whether the curve's last value is not finite either

    @property
    def sentence(self) -> str:
        """What is not finite, and from where on: one line without a full stop."""
        where = f"step {self.step}" + (f" of rank {self.rank}" if self.rank else "")
        if self.attempt > 1:
            where += f" of attempt {self.attempt}"
        if self.line is not None:
            where += f", log line {self.line}" + (f" of node {self.node}" if self.node else "")
        return f"{self.name} is not finite since {where}" if self.last else f"{self.name} was not finite at {where}"


def find(store: Store, run_id: str, rank: int | None = 0) -> list[NotFinite]:
    """Return the first NaN or infinite value of each curve of a rank, of all ranks for None; the earliest first."""
    blocks = store.select(
        "SELECT a.number, c.attempt_id, c.node, c.block, c.name, c.rank FROM curves c JOIN attempts a USING (attempt_id)"
        f" WHERE a.run_id = ? AND c.finite < c.points AND {of_rank(rank)} ORDER BY a.number, c.block, c.node, c.name",
        (run_id,),
    )
    if not blocks:
        return []
    last = {(row.name, row.rank): row.last for row in store.curves.summary(run_id, rank)}
    found: dict[tuple[str, int], NotFinite] = {}
    for number, attempt_id, node, block, name, of in blocks:
        if (name, of) in found:
            continue
        rows = store.select(
            "SELECT seq, step FROM metrics WHERE attempt_id = ? AND node = ? AND seq >= ? AND seq < ? AND name = ?"
            " AND rank = ? AND NOT (value IS NOT NULL AND value > -9e999 AND value < 9e999) ORDER BY seq LIMIT 1",
            (attempt_id, node, block * BLOCK, (block + 1) * BLOCK, name, of),
        )
        for seq, step in rows:
            line = seq if seq < FIRST_SEQ else None
            still = not math.isfinite(last.get((name, of), math.nan))
            found[name, of] = NotFinite(name, of, step, number, node, line, still)
    return sorted(found.values(), key=lambda each: (each.attempt, each.step, each.name))
