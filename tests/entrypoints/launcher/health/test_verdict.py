"""What the check says of nodes: the table of faults, each named with its node, and no alarm on healthy ones."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path

import pytest
from launcher.health import figures
from launcher.health.verdict import CHECK_S, Check, Checks, judge
from launcher.manifest import Manifest as Received
from launcher.world.outcome import ClusterState, Outcome, Restart, Start

from cloudtrain.backends.manifest import Manifest

# As drivers 535 and 550 print them, with --format=csv,noheader,nounits.
H100 = "{}, NVIDIA H100 80GB HBM3, 550.54.15, Enabled, 0, 16, 0x0000000000000001, 00000000:{}:00.0"
BUSES = ("1B", "3B", "4C", "5D")
XID = "[ {:.6f}] NVRM: Xid (PCI:0000:3b:00): {}, pid=1234, name=python, GPU has fallen off the bus."
UPTIME_S = 1e6


def report(seed: int = 0) -> dict:
    """Return the report of a healthy node of four GPUs."""
    drawn = random.Random(seed)
    device = {"name": "NVIDIA H100 80GB HBM3", "wrong": False}
    speeds = {"tflops": 620.0, "memory": 2900.0, "host": 52.0, "peer": 380.0}
    return {
        "smi": {
            "gpus": "\n".join(H100.format(index, bus) for index, bus in enumerate(BUSES)),
            "rows": "\n".join(f"00000000:{bus}:00.0, No, No" for bus in BUSES),
        },
        "xid": [],
        "uptime": UPTIME_S,
        "cpus": 96,
        "shm": 540_000_000_000 + drawn.randrange(10**9),
        "free": 10**12,
        "torch": "2.13.0",
        "cuda": "12.8",
        "clock": 1.7e9 + drawn.uniform(0, 10),
        "devices": [
            {**device, **{key: value * drawn.uniform(0.93, 1.03) for key, value in speeds.items()}} for _ in BUSES
        ],
        "link": {"wrong": False, "all": 40 * drawn.uniform(0.8, 1.2), "pair": 45 * drawn.uniform(0.8, 1.2)},
        "seconds": 9.0,
    }


def read(data: dict, before: bytes = b"", after: bytes = b"") -> dict:
    return figures.read(before + b"\n::health::" + json.dumps(data).encode() + b"\n" + after)


def smi(data: dict, index: int, old: str, new: str, table: str = "gpus") -> None:
    lines = data["smi"][table].split("\n")
    assert old in lines[index]
    lines[index] = lines[index].replace(old, new)
    data["smi"][table] = "\n".join(lines)


def set_device(data: dict, index: int, **values) -> None:
    data["devices"][index].update(values)


LOST_LINE = "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error"
# What is seeded on node 1 of four, whether it is broken by it, and what is said.
FAULTS = {
    "row failed": (lambda d: smi(d, 1, "No, No", "No, Yes", "rows"), True, "GPU 1: a memory row could not be remapped"),
    "row waits": (lambda d: smi(d, 2, "No, No", "Yes, No", "rows"), True, "GPU 2: a memory row waits to be remapped"),
    "row waits, in digits": (lambda d: smi(d, 2, "No, No", "1, 0", "rows"), True, "GPU 2: a memory row waits"),
    "ECC, remapped": (lambda d: smi(d, 1, "Enabled, 0", "Enabled, 2"), False, "GPU 1: 2 uncorrected ECC errors"),
    "ECC, without remapping": (
        lambda d: (smi(d, 1, "Enabled, 0", "Enabled, 1"), d["smi"].update(rows="")),
        True,
        "GPU 1: 1 uncorrected ECC error (",
    ),
    "needs a reset": (
        lambda d: smi(d, 3, "Enabled, 0, 16, 0x0000000000000001", ", ".join(["[GPU requires reset]"] * 4)),
        True,
        "GPU 3: GPU requires reset (nvidia-smi)",
    ),
    "lost": (lambda d: d["smi"].update(gpus=LOST_LINE), True, f"nvidia-smi: {LOST_LINE}"),
    "no answer": (
        lambda d: d.update(smi={"error": "nvidia-smi did not answer within 12 s"}),
        False,
        "nvidia-smi did not answer",
    ),
    "Xid 79": (lambda d: d["xid"].append(XID.format(UPTIME_S - 300, 79)), True, "GPU 1: Xid 79 5 minutes ago (dmesg)"),
    "Xid 94": (lambda d: d["xid"].append(XID.format(UPTIME_S - 300, 94)), False, "GPU 1: Xid 94 5 minutes ago"),
    "too hot": (lambda d: smi(d, 0, "0x0000000000000001", "0x0000000000000048"), False, "slowed down: it is too hot"),
    "power": (lambda d: smi(d, 0, "0x0000000000000001", "0x0000000000000080"), False, "its power supply asks for it"),
    "ECC off": (lambda d: smi(d, 0, "Enabled, 0", "Disabled, [N/A]"), False, "ECC off, on other nodes on"),
    "driver": (
        lambda d: d["smi"].update(gpus=d["smi"]["gpus"].replace("550.54.15", "535.104.05")),
        False,
        "driver 535.104.05, on other nodes 550.54.15",
    ),
    "narrow link": (lambda d: smi(d, 2, "0, 16,", "0, 8,"), False, "link width of GPUs x8, on other nodes x16"),
    "wrong product": (lambda d: set_device(d, 2, wrong=True), True, "GPU 2: a matrix product was wrong"),
    "slow GPU": (lambda d: set_device(d, 3, tflops=410.0), False, "GPU 3: matrix product 410 TFLOP/s, 3"),
    "slow memory": (lambda d: set_device(d, 0, memory=1900.0), False, "GPU 0: memory 1.9e+03 GB/s, 3"),
    "slow host": (lambda d: set_device(d, 0, host=11.0), False, "GPU 0: host to device 11 GB/s, "),
    "CUDA says ECC": (
        lambda d: d["devices"].__setitem__(
            1, {"error": "CUDA error: uncorrectable ECC error encountered CUDA kernel errors"}
        ),
        True,
        "GPU 1: it was not measured: CUDA error: uncorrectable ECC",
    ),
    "GPU hangs": (lambda d: d["devices"].__setitem__(0, {"error": "it did not finish"}), False, "GPU 0: it was not"),
    "slow GPU link": (lambda d: set_device(d, 1, peer=40.0), False, "GPU 1: GPU to GPU 40 GB/s, "),
    "CUDA": (lambda d: d.update(cuda="12.1"), False, "CUDA 12.1, on other nodes 12.8"),
    "clock": (lambda d: d.update(clock=1.7e9 - 300), False, "its clock is 30"),
    "slow network": (lambda d: d["link"].update(pair=9.0), False, "network 9 GB/s, "),
    "wrong sum": (lambda d: d["link"].update(wrong=True), False, "all-reduce between the nodes gave a wrong sum"),
    "no network": (
        lambda d: d.update(link={"error": "timed out"}),
        False,
        "all-reduce between the nodes failed: timed",
    ),
    "full disk": (lambda d: d.update(free=200 << 20), False, "its disk has 200 MB free"),
    "small shm": (lambda d: d.update(shm=64 << 20), False, "/dev/shm 64 MB, on other nodes 262144 MB"),
    "few processors": (lambda d: d.update(cpus=0.4), False, "processors 0.4, on other nodes 96"),
}


# A row of the page -> what is seeded.
PAGE = Path(__file__).parents[4] / "docs" / "how" / "bad-nodes.md"
ROWS = {
    "a wrong matrix product; an ECC error in CUDA": ["wrong product", "CUDA says ECC"],
    "`nvidia-smi`: a GPU is lost or needs a reset, a row remap of its memory is pending or failed, an ECC error "
    "without remapping": ["lost", "needs a reset", "row waits", "row waits, in digits", "row failed", "ECC, without remapping"],
    "`dmesg`, where readable: Xid 48, 64, 74, 79, 95, 119 or 120 in the last 15 minutes": ["Xid 79"],
    "other ECC errors, Xid 63, 92 or 94, throttling by heat or power": ["ECC, remapped", "Xid 94", "too hot", "power"],
    "a GPU 20 % slower than the median of the other nodes, a link below a third of their median": [
        "slow GPU", "slow memory", "slow host", "slow GPU link", "slow network",
    ],
    "a part of the check that does not answer, a wrong all-reduce result": ["no answer", "GPU hangs", "no network", "wrong sum"],
    "a driver, CUDA, ECC mode, link width, `/dev/shm`, clock or number of processors that differs between nodes; "
    "a full disk": [
        "driver", "CUDA", "clock", "ECC off", "narrow link", "small shm", "few processors", "full disk",
    ],
}  # fmt: skip


def test_the_page_has_the_faults():
    table = ["| the check finds | result |", "| --- | --- |"]
    for text, names in ROWS.items():
        [broken] = {FAULTS[name][1] for name in names}
        table.append(f"| {text} | {'broken' if broken else 'warning'} |")
    assert "\n".join(table) in PAGE.read_text()
    assert sorted(name for names in ROWS.values() for name in names) == sorted(FAULTS)
    numbers = {
        kind: {int(n) for n in re.findall(r"\d+", row)} - {15} for kind, row in zip("fc", [*ROWS][2:4], strict=True)
    }
    assert numbers == {"f": set(figures.FATAL_XIDS), "c": set(figures.CONTAINED_XIDS)}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_with_its_node(fault):
    seed, broken, text = FAULTS[fault]
    data = [report(node) for node in range(4)]
    seed(data[1])
    found = judge({node: read(each) for node, each in enumerate(data)})
    assert [finding.node for finding in found] == [1]
    assert found[0].broken is broken and text in found[0].text, found


def test_a_node_that_prints_nothing_is_named_and_not_broken():
    found = judge({0: read(report()), 1: figures.read(b"Killed\n")})
    assert [(finding.node, finding.broken) for finding in found] == [(1, False)]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["xid"].append(XID.format(UPTIME_S - 3600, 79)),  # an hour ago: of another job
        lambda d: d["xid"].append(XID.format(UPTIME_S - 60, 31)),  # the script's own error
        lambda d: d["xid"].append(XID.format(UPTIME_S - 60, 79).replace("3b:00", "9f:00")),  # another job's GPU
        lambda d: d["xid"].append(XID.format(UPTIME_S + 9000, 79)),  # a container's uptime is another one
        lambda d: d["xid"].append("NVRM: Xid (PCI:0000:3b:00): 79, of no known time"),
        lambda d: smi(d, 0, "0x0000000000000001", "0x0000000000000004"),  # capped by power, as under full load
        lambda d: smi(d, 0, "0x0000000000000001", "[N/A]"),
        lambda d: smi(d, 0, "Enabled, 0", "[N/A], [N/A]"),
        lambda d: d.update(smi={}),
        lambda d: d["smi"].update(gpus='Field "clocks_throttle_reasons.active" is not a valid field to query.\n'),
        lambda d: d["smi"].update(rows="[N/A], [N/A], [N/A]\n" * 4),
        lambda d: d.update(devices=[], link={}, torch="ModuleNotFoundError: No module named 'torch'"),
        lambda d: d.update(link={}),  # it came too late: others' all-reduce failed for it
    ],
)
def test_what_is_no_fault(change):
    data = [report(node) for node in range(4)]
    change(data[1])
    if not data[1]["link"]:
        data[2]["link"] = {"error": "timed out"}
    assert judge({node: read(each) for node, each in enumerate(data)}) == []


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_healthy_nodes_give_no_alarm(nodes):
    for start in range(200):
        assert judge({node: read(report(1000 * start + node)) for node in range(nodes)}) == []


def test_figures_of_other_hardware_are_not_compared():
    slower = report(1)
    slower["devices"] = [{**device, "name": "NVIDIA L4", "tflops": 60.0} for device in slower["devices"]]
    assert judge({0: read(report()), 1: read(slower)}) == []


def test_a_report_is_read_among_other_output_and_the_last_whole_one_counts():
    early = {**report(), "devices": [], "link": {}}
    whole = read(report(), b"Warning: x\n::health::" + json.dumps(early).encode(), b'::health::{"devices": [{"tfl')
    assert len(whole["devices"]) == 4 and len(whole["gpus"]) == 4 and whole["gpus"][1]["bus"] == "0000:3b:00"


def gang(nodes: int = 2, own_machine: bool = False, **manifest) -> ClusterState:
    """Return the state of nodes that are all ready."""
    orders = Received(Manifest("r", 1, ("t.py",), nodes, 1, **manifest).to_dict())
    made = ClusterState(orders, 10.0, 10.0)
    made.checks = Checks(orders, own_machine)
    for node in range(nodes):
        made.join(node, f"host{node}", 1)
        made.ready(node)
    return made


def test_nodes_with_gpus_are_measured_and_then_start():
    made = gang(gpus_per_node=4)
    assert made.decide(0.0) == Check((0, 1)) and made.decide(0.1) is None and made.missing == []
    made.checks.add(1, read(report(1)))
    assert made.decide(1.0) is None
    made.checks.add(0, read(report(0)))
    assert made.decide(2.0) == Start((0, 1)) and made.decide(3.0) is None
    [line] = made.checks.take_lines()
    assert (
        line.startswith("health check: 2 nodes without a fault; medians: matrix product 6") and not made.checks.findings
    )
    assert made.checks.take_lines() == []


def test_a_broken_node_ends_the_attempt_as_lost():
    made = gang(gpus_per_node=4)
    made.decide(0.0)
    broken = copy.deepcopy(report(1))
    set_device(broken, 2, wrong=True)
    made.checks.add(0, read(report(0)))
    made.checks.add(1, read(broken))
    reason = "node 1 (host1) failed the health check: GPU 2: a matrix product was wrong"
    assert made.decide(1.0) == Outcome("LOST", None, "launcher", None, reason)


@pytest.mark.parametrize("health", ["", "strict"])
def test_a_slow_node_is_refused_where_the_job_is_strict(health):
    made = gang(gpus_per_node=4, health=health)
    made.decide(0.0)
    slow = report(1)
    set_device(slow, 0, tflops=310.0)
    made.checks.add(0, read(report(0)))
    made.checks.add(1, read(slow))
    decision = made.decide(1.0)
    said = "GPU 0: matrix product 310 TFLOP/s"
    if health:
        assert decision.state == "LOST" and decision.reason.startswith(
            f"node 1 (host1) failed the health check: {said}"
        )
    else:
        assert decision == Start((0, 1)) and made.checks.take_lines()[0].startswith(
            f"health check: node 1 (host1): {said}"
        )


def test_a_node_that_does_not_report_is_waited_for_a_while():
    made = gang(gpus_per_node=4)
    made.decide(0.0)
    made.checks.add(0, read(report(0)))
    assert made.decide(CHECK_S - 1) is None
    assert (
        made.decide(CHECK_S) == Start((0, 1)) and "node 1 (host1): it has not reported" in made.checks.take_lines()[0]
    )


def test_figures_that_cannot_be_read_end_nothing():
    made = gang(gpus_per_node=4)
    made.decide(0.0)
    made.checks.add(0, {"devices": 7})
    made.checks.add(1, {"devices": [{"tflops": "fast"}]})
    assert made.decide(1.0) == Start((0, 1)) and "cannot be compared" in made.checks.take_lines()[0]


@pytest.mark.parametrize(
    ("wanted", "keys"),
    [
        (True, {"nodes": 2, "gpus_per_node": 1}),
        (True, {"nodes": 1, "gpus_per_node": 8}),
        (True, {"nodes": 2, "health": "strict", "own_machine": True}),
        (False, {"nodes": 1, "gpus_per_node": 4}),
        (False, {"nodes": 4}),  # no GPU
        (False, {"nodes": 2, "gpus_per_node": 8, "own_machine": True}),  # simulated nodes share their hardware
        (False, {"nodes": 2, "gpus_per_node": 8, "health": "off"}),
    ],
)
def test_which_jobs_are_checked(wanted, keys):
    assert isinstance(gang(**keys).decide(0.0), Check if wanted else Start)


def test_a_stop_during_the_check_ends_the_attempt():
    made = gang(gpus_per_node=4)
    made.decide(0.0)
    made.stop("CANCELLED", 1.0)
    assert made.decide(1.0).state == "CANCELLED"


def test_a_node_that_is_lost_during_the_check_ends_the_attempt():
    made = gang(gpus_per_node=4)
    made.decide(0.0)
    made.lose(1, "no message arrived for 10 s")
    assert made.decide(1.0).state == "LOST"


def test_before_a_restart_in_place_the_nodes_are_measured_again():
    made = gang(gpus_per_node=4, restarts=1)
    made.decide(0.0)
    for node in range(2):
        made.checks.add(node, read(report(node)))
    assert made.decide(1.0) == Start((0, 1))
    made.fail(1, 1, 1, 5.0, "rank 1 exited with code 1", True)
    made.decide(5.0)
    assert isinstance(made.decide(9.0), Restart)
    for node in range(2):
        made.ready(node)
    assert made.decide(10.0) == Check((0, 1)) and made.decide(11.0) is None
    broken = report(1)
    smi(broken, 2, "No, No", "Yes, No", "rows")
    made.checks.add(0, read(report(0)))
    made.checks.add(1, read(broken))
    outcome = made.decide(12.0)
    assert outcome.state == "LOST" and outcome.reason.startswith("node 1 (host1) failed the health check: GPU 2")
