"""The panel with the log of a run."""

from __future__ import annotations

from cloudtrain.console.pages.runlog import name_origins


def test_lines_are_chosen_by_node_and_its_role():
    ranks = [(0, -1), (0, 0), (1, 0)]
    assert name_origins(ranks, ["trainer", "server"]) == [
        "all nodes", "node 0 trainer", "node 1 server",
        "node 0 trainer, launcher", "node 0 trainer, rank 0", "node 1 server, rank 0",
    ]  # fmt: skip
    assert name_origins(ranks[:1], []) == ["all nodes", "node 0", "node 0, launcher"]
