"""Compare the figures of the nodes: which node is broken, which is slow; no I/O.

Broken is a hardware error that other jobs would meet too. Everything else is a warning, unless the job says health: strict.
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence

from ..manifest import Manifest
from . import figures as node_figures

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any

    Figures = Mapping[str, Any]

GPU_SHARE = 0.8  # of the median of other nodes: a GPU below is slow
LOOSE_SHARE = 0.5  # the same for processors and transfers from the host, which other programs use too
LINK_SHARE = 1 / 3  # the same for links, whose time is that of two nodes and of their processors
FREE_BYTES = 1 << 30
CLOCK_S = (
    60.0  # by which clocks may differ: stores refuse requests from 5 minutes on, and nodes are not measured at once
)
HARDWARE = re.compile(r"uncorrectable|hardware stack error|GPU is lost|fallen off the bus")  # of cudaGetErrorString
MEASURES = (
    ("tflops", "matrix product", "TFLOP/s"),
    ("memory", "memory", "GB/s"),
    ("host", "host to device", "GB/s"),
    ("peer", "GPU to GPU", "GB/s"),
)

CHECK_S = 30.0  # for which node 0 waits for figures: measure.py's limit, and some for a machine that is busy
MANY_GPUS = 8  # of a job, from which on a single node is checked too
MOST_LINES = 8  # of warnings

Check = namedtuple("Check", "node_ranks")
Check.__doc__ = "These nodes are to be measured before they start."

Finding = namedtuple("Finding", "node broken text")
Finding.__doc__ = "What is wrong with a node; `broken` ends the attempt, others are warnings."


class Checks:
    """The check of an attempt's nodes as node 0 sees it: begun when all are ready, decided when all are measured."""

    def __init__(self, manifest: Manifest, own_machine: bool) -> None:
        self._manifest, self._own_machine = manifest, own_machine
        self._figures: dict[int, Figures] = {}
        self._lines: list[str] = []
        self._end_at: float | None = None
        self.findings: list[Finding] = []

    @property
    def is_wanted(self) -> bool:
        """Whether the nodes are checked; with `auto` those with GPUs, where they are several machines or have many."""
        if self._manifest.health != "auto":
            return self._manifest.health == "strict"
        gpus, nodes = self._manifest.gpus_per_node * self._manifest.nodes, self._manifest.nodes
        return gpus >= MANY_GPUS if nodes == 1 else gpus > 0 and not self._own_machine

    @property
    def begun(self) -> bool:
        return self._end_at is not None

    def again(self) -> Checks:
        """Return the check before another start of the same nodes."""
        return Checks(self._manifest, self._own_machine)

    def add(self, node: int, figures: Figures) -> None:
        """Record what was measured on a node."""
        self._figures[node] = figures

    def take_lines(self) -> list[str]:
        """Return what the log is to say, once."""
        lines, self._lines = self._lines, []
        return lines

    def decide(self, names: Mapping[int, str], now: float) -> Check | str | bool | None:
        """Return that nodes are to be measured, True to start, None to wait, or why the attempt ends. `now` is monotonic."""
        if self._end_at is None:
            if not self.is_wanted:
                return True
            self._end_at = now + CHECK_S
            return Check(tuple(names))
        if len(self._figures) < len(names) and now < self._end_at:
            return None
        try:
            self.findings = judge({node: self._figures.get(node, {}) for node in names})
        except node_figures.UNREADABLE as error:
            self._lines = [f"health check: the figures cannot be compared: {type(error).__name__}: {error}"]
            return True
        broken = [finding for finding in self.findings if finding.broken or self._manifest.health == "strict"]
        if broken:
            node, _, text = broken[0]
            more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
            self._lines = [f"health check: {names[finding.node]}: {finding.text}" for finding in broken[1:MOST_LINES]]
            return f"{names[node]} failed the health check: {text}{more}"
        self._lines = [f"health check: {names[node]}: {text}" for node, _, text in self.findings[:MOST_LINES]]
        if not self.findings:
            self._lines = [summary(self._figures)]
        return True


def judge(nodes: Mapping[int, Figures]) -> list[Finding]:
    """Return what is wrong, by node; a figure is compared with the median of the other nodes with equal hardware."""
    return [Finding(node, broken, text) for node in sorted(nodes) for broken, text in _faults(node, nodes)]


def _faults(node: int, nodes: Mapping[int, Figures]) -> list[tuple[bool, str]]:
    own = nodes[node]
    if not own:
        return [(False, "it has not reported: the check did not finish in time")]
    faults = [(bool(broken), str(text)) for broken, text in own.get("faults", ())]
    for gpu in own.get("gpus", ()):
        faults += [(broken, f"GPU {gpu['index']}: {text}") for broken, text in _gpu_faults(gpu)]
    for index, device in enumerate(own.get("devices", ())):
        name = f"GPU {index}" if device.get("name") != "CPU" else "CPU"
        faults += [(broken, f"{name}: {text}") for broken, text in _device_faults(device)]
        faults += [(False, f"{name}: {text}") for text in _slow(node, nodes, index, device)]
    faults += [(False, text) for text in (*_link_faults(node, nodes), *_different(node, nodes))]
    clocks = _others(node, nodes, lambda figures: figures.get("clock"))
    ahead_s = own["clock"] - _median(clocks) if clocks and "clock" in own else 0.0
    if abs(ahead_s) > CLOCK_S:
        faults.append(
            (False, f"its clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} other nodes'")
        )
    if own.get("free", FREE_BYTES) < FREE_BYTES:
        faults.append((False, f"its disk has {own['free'] >> 20} MB free"))
    return faults


def _gpu_faults(gpu: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """Return what nvidia-smi says of a GPU.

    Where rows are remapped, an uncorrected error has been dealt with unless a row waits or could not be remapped:
    https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html (2026-11-29).
    """
    faults = []
    if gpu.get("failed"):
        faults.append((True, "a memory row could not be remapped (nvidia-smi): it needs repair"))
    if gpu.get("pending"):
        faults.append((True, "a memory row waits to be remapped (nvidia-smi): it needs a reset"))
    if count := gpu.get("uncorrected"):
        faults.append(("pending" not in gpu, f"{count} uncorrected ECC error{'s' * (count > 1)} (nvidia-smi)"))
    if gpu.get("slowdown"):
        faults.append((False, f"it is slowed down: {gpu['slowdown']} (nvidia-smi)"))
    return faults


def _device_faults(device: Mapping[str, Any]) -> list[tuple[bool, str]]:
    if device.get("wrong"):
        return [(True, "a matrix product was wrong")]
    if error := device.get("error"):
        return [(bool(HARDWARE.search(str(error))), f"it was not measured: {error}")]
    return []


def _slow(node: int, nodes: Mapping[int, Figures], index: int, device: Mapping[str, Any]) -> list[str]:
    """Return how far the figures of a device are below those of other nodes; of a single node, below its other GPUs'."""
    others = [
        (place, other)
        for number, figures in nodes.items()
        for place, other in enumerate(node_figures.devices(figures))
        if other["name"] == device.get("name") and (number != node if len(nodes) > 1 else place != index)
        if other["name"] != "CPU" or figures.get("cpus") == nodes[node].get("cpus")
    ]
    slow = []
    for key, what, unit in MEASURES:
        share = GPU_SHARE if device.get("name") != "CPU" and key != "host" else LOOSE_SHARE
        share = LINK_SHARE if key == "peer" else share
        # Some neighbours are nearer than others: only links of the same place are equal.
        equal = [other for place, other in others if key != "peer" or place == index]
        median = _median([other[key] for other in equal if key in other])
        if key in device and device[key] < share * median:
            slow.append(f"{what} {_below(device[key], median, unit)}")
    return slow


def _link_faults(node: int, nodes: Mapping[int, Figures]) -> list[str]:
    own = nodes[node].get("link", {})
    if own.get("error") and all(figures.get("link") for figures in nodes.values()):  # else others came too late
        return [f"all-reduce between the nodes failed: {own['error']}"]
    if own.get("wrong"):
        return ["all-reduce between the nodes gave a wrong sum"]
    median = _median(_others(node, nodes, lambda figures: figures.get("link", {}).get("pair")))
    if own.get("pair", median) < LINK_SHARE * median:
        return [f"network {_below(own['pair'], median, 'GB/s')}"]
    return []


def _different(node: int, nodes: Mapping[int, Figures]) -> list[str]:
    """Return in what a node differs from most others; of two nodes the second is named."""
    different = []
    for what, value in FACTS.items():
        values = [value(nodes[number]) for number in sorted(nodes) if value(nodes[number]) is not None]
        if not values:
            continue
        usual, own = max(values, key=values.count), value(nodes[node])
        if own is not None and own != usual and values.count(usual) >= values.count(own):
            different.append(f"{what} {own}, on other nodes {usual}")
    return different


def _driver(figures: Figures) -> str | None:
    return next((gpu["driver"] for gpu in figures.get("gpus", ())), None)


def _cuda(figures: Figures) -> str | None:
    """Return the version of CUDA that torch was built for."""
    return figures.get("cuda")


def _ecc(figures: Figures) -> str | None:
    return next(("on" if gpu["ecc"] else "off" for gpu in figures.get("gpus", ()) if "ecc" in gpu), None)


def _width(figures: Figures) -> str | None:
    """Return the narrowest link of a node's GPUs."""
    widths = [gpu["width"] for gpu in figures.get("gpus", ()) if "width" in gpu]
    return f"x{min(widths)}" if widths else None


def _cpus(figures: Figures) -> float | None:
    return figures.get("cpus")


def _shm(figures: Figures) -> str | None:
    """Return the size of /dev/shm to the power of two: machines of one kind differ by some pages."""
    return f"{2 ** (figures['shm'].bit_length() - 1) >> 20} MB" if figures.get("shm") else None


FACTS: Mapping[str, Callable[[Figures], object]] = {
    "driver": _driver, "CUDA": _cuda, "ECC": _ecc, "link width of GPUs": _width, "/dev/shm": _shm, "processors": _cpus,
}  # fmt: skip


def _others(node: int, nodes: Mapping[int, Figures], value: Callable[[Figures], Any]) -> list[float]:
    return [value(figures) for number, figures in nodes.items() if number != node and value(figures) is not None]


def _median(values: Sequence[float]) -> float:
    """Return the median, 0 of none."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return 0.0 if not ordered else (ordered[middle] + ordered[~middle]) / 2


def _below(value: float, median: float, unit: str) -> str:
    return f"{value:.3g} {unit}, {100 * (1 - value / median):.0f} % below the median of {median:.3g}"


def summary(nodes: Mapping[int, Figures]) -> str:
    """Return the line of the log on nodes that are fit: the medians of what was measured."""
    devices = [device for figures in nodes.values() for device in node_figures.devices(figures)]
    shown = []
    for key, what, unit in MEASURES:
        if values := [device[key] for device in devices if key in device]:
            shown.append(f"{what} {_median(values):.3g} {unit}")
    if values := [figures["link"]["all"] for figures in nodes.values() if figures.get("link", {}).get("all")]:
        shown.append(f"all-reduce {_median(values):.3g} GB/s")
    count = f"{len(nodes)} node{'s' * (len(nodes) > 1)}"
    if not shown:
        return f"health check: {count} without a fault; nothing was measured, as torch cannot be imported"
    return f"health check: {count} without a fault; medians: {', '.join(shown)}"
