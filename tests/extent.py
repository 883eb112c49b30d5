"""What runs when: four tiers of tests, each with the tiers before it.

0 `make test-quick`: what decides. No process but git, no socket but those of servers inside the test, no sleep:
  tests/decisions.py fails a test that does more.
1 `make test`: a real local process for each behaviour, one smoke of each strategy family and simulator.
2 `make test-all`: contract suites on simulators, the console in a browser, the trainer's matrix, pages of the documentation.
3 `make test-long`: hosts with sshd and Slurm, scripts of third parties, long draws, versions. `.ci/run` runs a sample of it,
  tests/sample.py.

A test is of tier 0 unless tests/tiers.txt names it. A test that uses the fixture `lab` or `slurm`, or has the mark `long`,
is of tier 3; one with the mark `slow` or `docker` of tier 2.

Of the contract suite a target of tier 2 runs there what the table names as `suite::TEST`, the rest in tier 3. Most of that
rest is the launcher's doing, which the whole suite on `local` shows in tier 1.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("tiers.txt")
SUITE = "cloudtrain.testing.suite."
LAB = {"lab", "slurm", "_lab", "_slurm"}  # fixtures: hosts in network namespaces
TIERS = {
    name: int(tier)
    for tier, _, name in (line.partition(" ") for line in TABLE.read_text().splitlines() if not line.startswith("#"))
}


def tier_of_name(node_id: str) -> int:
    """Return the tier that the tables give to a test, a file or a folder, by its id below tests/."""
    return next((TIERS[name] for name in names_of(node_id) if name in TIERS), 0)


def names_of(node_id: str) -> list[str]:
    """Return the names that stand for a test, the most specific one first: itself, its function, its class, file and folders."""
    path, *inside = node_id.partition("[")[0].split("::")
    within = ["::".join((path, *inside[:end])) for end in range(len(inside), 0, -1)]
    parts = path.split("/")
    return [node_id, *within, *("/".join(parts[:end]) for end in range(len(parts), 0, -1))]


def tier_of(item: pytest.Item) -> int:
    """Return the tier of a test that pytest has collected."""
    if item.get_closest_marker("long") or LAB.intersection(getattr(item, "fixturenames", ())):
        return 3
    least = 2 if item.get_closest_marker("slow") or item.get_closest_marker("docker") else 0
    tier = max(tier_of_name(item.nodeid.removeprefix("tests/")), least)
    if tier == 2 and getattr(item, "obj", tier_of).__module__.startswith(SUITE):
        return max(TIERS.get(f"suite::{name}", 0) for name in (item.name, item.originalname)) or 3
    return tier


def is_later(path: str, tier: int) -> bool:
    """Return whether a file, by its path below tests/, has only tests of later tiers than this one."""
    return tier_of_name(path) > tier and not any(name.startswith(f"{path}::") and TIERS[name] <= tier for name in TIERS)
