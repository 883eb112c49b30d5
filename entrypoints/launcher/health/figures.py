"""Read a node's report (measure.py): the tables of nvidia-smi, and the kernel's lines on GPU errors (Xid)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError)  # what a malformed report may raise
MARK = b"::health::"
XID = re.compile(
    r"\[ *(?P<at>\d{1,12}\.\d{1,9})\] NVRM: Xid \(PCI:(?P<gpu>[0-9a-fA-F:.]{1,40})\): (?P<number>\d{1,4})\b"
)
XID_S = 900.0  # older ones were of earlier jobs, and the GPU may have been reset since
# https://docs.nvidia.com/deploy/xid-errors/ (2026-11-27): errors after which the GPU needs a reset, a restart of the node
# or a repair; and those that the hardware has contained.
FATAL_XIDS = frozenset((48, 64, 74, 79, 95, 119, 120))
CONTAINED_XIDS = frozenset((63, 92, 94))
# nvmlClocksEventReasons of nvml.h (2026-11-27), without those of a GPU that idles, is capped or has chosen clocks.
SLOWDOWNS = {0x40: "it is too hot", 0x80: "its power supply asks for it", 0x8: "by the hardware"}
REASONS = ("clocks_event_reasons", "clocks_throttle_reasons")  # of nvidia-smi, from driver 535 on and before
LOST = re.compile(r"GPU is lost|GPU requires reset|Unable to determine the device handle|fallen off the bus")


def read(output: bytes) -> dict[str, Any]:
    """Return a node's figures from what measure.py has printed, {} where it has printed no report.

    Of each GPU: `index`, `name`, `driver`, `ecc` (on or not), `uncorrected` errors, `width` of its link, `slowdown`,
    `pending` and `failed` rows; what a GPU does not report is left out. `faults` are (fatal, text).
    """
    lines = [line for line in output.split(b"\n") if line.startswith(MARK)]
    report: dict[str, Any] = {}
    for line in reversed(lines):  # the last one may be cut off
        try:
            report = json.loads(line[len(MARK) :])
            break
        except ValueError:
            continue
    if not report:
        return {}
    smi = report.pop("smi", {})
    gpus, faults = read_table(str(smi.get("gpus", "")), str(smi.get("rows", "")))
    if smi.get("error"):
        faults.append((False, str(smi["error"])))
    faults += read_xids(report.pop("xid", ()), float(report.pop("uptime", 0)), gpus)
    return {**report, "gpus": gpus, "faults": faults}


def read_table(gpus: str, rows: str) -> tuple[list[dict[str, Any]], list[tuple[bool, str]]]:
    """Return the GPUs of nvidia-smi's tables, and the faults of those that do not answer."""
    made, faults = [], []
    for line in gpus.splitlines():
        lost, parts = LOST.search(line), [part.strip() for part in line.split(",")]
        if len(parts) != 8 or not parts[0].isdigit():
            faults += [(True, f"nvidia-smi: {line.strip()[:150]}")] * bool(lost)
            continue
        index, name, driver, ecc, uncorrected, width, reasons, bus = parts
        if lost:
            faults.append((True, f"GPU {index}: {lost[0]} (nvidia-smi)"))
            continue
        gpu: dict[str, Any] = {"index": int(index), "name": name, "driver": driver, "bus": _bus(bus)}
        if ecc in ("Enabled", "Disabled"):
            gpu["ecc"] = ecc == "Enabled"
        gpu.update({key: int(text) for key, text in (("uncorrected", uncorrected), ("width", width)) if text.isdigit()})
        if (why := slowdown(reasons)) is not None:
            gpu["slowdown"] = why
        made.append(gpu)
    by_bus = {gpu["bus"]: gpu for gpu in made}
    for line in rows.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and _bus(parts[0]) in by_bus and parts[1] in ("Yes", "No", "0", "1"):
            by_bus[_bus(parts[0])].update(pending=parts[1] in ("Yes", "1"), failed=parts[2] in ("Yes", "1"))
    return made, faults


def slowdown(reasons: str) -> str | None:
    """Return why a GPU is slowed down, by nvidia-smi's bits; "" where it is not, None where they are not reported."""
    if not re.fullmatch("0x[0-9a-fA-F]{1,16}", reasons):
        return None
    return next((text for bit, text in SLOWDOWNS.items() if int(reasons, 16) & bit), "")


def read_xids(lines: Iterable[object], uptime_s: float, gpus: Iterable[Mapping[str, Any]]) -> list[tuple[bool, str]]:
    """Return the hardware errors of some GPUs in the last minutes, of lines of the kernel's log: one of each kind."""
    names = {gpu["bus"]: f"GPU {gpu['index']}" for gpu in gpus}  # other GPUs of the machine may be other jobs'
    newest: dict[tuple[str, int], float] = {}
    for line in lines:
        match = XID.match(str(line))
        if match is None or int(match["number"]) not in FATAL_XIDS | CONTAINED_XIDS:
            continue
        age_s = uptime_s - float(match["at"])
        if _bus(match["gpu"]) in names and -60 < age_s <= XID_S:
            newest[names[_bus(match["gpu"])], int(match["number"])] = age_s
    return [
        (number in FATAL_XIDS, f"{name}: Xid {number} {max(0.0, age_s) / 60:.0f} minutes ago (dmesg)")
        for (name, number), age_s in newest.items()
    ]


def _bus(text: str) -> str:
    """Return a PCI address as 0000:3b:00: nvidia-smi writes 00000000:3B:00.0, the kernel PCI:0000:3b:00."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def devices(figures: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the devices that were measured."""
    return [device for device in figures.get("devices", ()) if "tflops" in device]
