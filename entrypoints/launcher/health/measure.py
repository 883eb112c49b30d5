"""The program that measures a node, in the ranks' interpreter: measure.py SECONDS.

It prints its report as one marked line of JSON after each part, so that a node that hangs has reported what came before.
Only the standard library is needed. Without torch nothing is measured, and nvidia-smi and the kernel log are still read.
MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE are those of the nodes, one process each.
"""

import json
import os
import re
import subprocess
import sys
import threading
from time import monotonic, time  # noqa: TID251 - the program runs by itself, without the launcher

MARK = "::health::"
SMI_S = 12.0  # nvidia-smi initializes each GPU where the driver's persistence mode is off
# nvidia-smi --help-query-gpu: the name of the reasons changed with driver 535, and an unknown field fails the whole query.
FIELDS = (
    "index,name,driver_version,ecc.mode.current,ecc.errors.uncorrected.volatile.total,pcie.link.width.current,"
    "{}.active,pci.bus_id"
)
REASONS = ("clocks_event_reasons", "clocks_throttle_reasons")
ROWS = "--query-remapped-rows=gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
SIZE = 4096  # of the matrices on a GPU; sums of so many products of 1 and -1 are exact in float16 (below 2048)
CPU_SIZE = 256  # a product takes about a millisecond: some are not interrupted, whatever else runs
BURST_S = 0.3


class Report:
    """What is known of the node so far; printed after each part."""

    def __init__(self, budget_s):
        self.end = monotonic() + budget_s
        self.data = {"devices": [], "link": {}}

    @property
    def left_s(self):
        return self.end - monotonic()

    def add(self, **parts):
        self.data.update(parts)
        print(f"\n{MARK}{json.dumps(self.data)}", flush=True)


def main():
    """Measure the node and leave at once, whatever a driver's thread still does."""
    report = Report(float(sys.argv[1]))
    began = monotonic()
    report.add(**facts())
    try:
        import torch
    except Exception as error:
        report.add(torch=f"{type(error).__name__}: {error}"[:200])
        os._exit(0)
    report.add(torch=torch.__version__, cuda=torch.version.cuda)
    devices(torch, report)
    if int(os.environ["WORLD_SIZE"]) > 1:
        report.add(link=link(torch, report))
    report.add(seconds=round(monotonic() - began, 1))
    os._exit(0)


def facts():
    """Return what nvidia-smi, the kernel log and the file systems say, as they say it."""
    found = {"clock": time(), "smi": smi(), "xid": [], "uptime": monotonic()}
    found["cpus"] = processors()
    try:
        shown = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=3, errors="replace").stdout
        found["xid"] = [line[:300] for line in shown.splitlines() if "NVRM: Xid" in line][-50:]
    except (OSError, subprocess.SubprocessError):
        pass  # the kernel log is for administrators on many machines
    for name, folder in (("shm", "/dev/shm"), ("free", os.getcwd())):
        try:
            space = os.statvfs(folder)
            found[name] = (space.f_blocks if name == "shm" else space.f_bavail) * space.f_frsize
        except OSError:
            pass
    return found


def processors():
    """Return how many processors this process may use, by its affinity and the quota of its control group."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        with open("/proc/self/cgroup") as file:
            groups = [line.strip().split(":", 2) for line in file]
    except (OSError, ValueError):
        return count
    for _, controllers, group in groups:
        while controllers == "" or "cpu" in controllers.split(","):
            count = min([count, *quotas(f"/sys/fs/cgroup{'/cpu' * bool(controllers)}{group.rstrip('/')}")])
            if group in ("", "/"):
                break
            group = os.path.dirname(group)
    return count


def quotas(folder):
    """Yield the processors that a control group allows: cpu.max of version 2, two files of version 1."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            texts = []
            for name in names:
                with open(os.path.join(folder, name)) as file:
                    texts += file.read().split()
            quota, period = texts
            if quota not in ("max", "-1"):
                yield round(int(quota) / int(period), 2)
        except (OSError, ValueError):
            pass  # the root has no quota


def smi():
    """Return the tables of nvidia-smi as text; `error` where it does not answer."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen == "":
        return {}
    which = ["-i", chosen] if chosen and not chosen.startswith("MIG") else []
    table = [*which, "--format=csv,noheader,nounits"]
    try:
        for reasons in REASONS:
            gpus = ask("--query-gpu=" + FIELDS.format(reasons), *table)
            if "not a valid field" not in gpus:
                break
        return {"gpus": gpus[:8000], "rows": ask(ROWS, *table)[:8000]}
    except subprocess.TimeoutExpired:
        return {"error": f"nvidia-smi did not answer within {SMI_S:g} s"}
    except OSError:
        return {}


def ask(*arguments):
    shown = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_S, errors="replace")
    return shown.stdout + shown.stderr


def devices(torch, report):
    """Measure all GPUs at the same time, or the processors of a node without."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    places = [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    found = [{"error": "it did not finish"} for _ in places]

    def measure(index):
        try:
            found[index] = device(torch, places[index])
        except Exception as error:
            found[index] = {"error": re.sub(r"\s+", " ", str(error))[:200]}

    threads = [threading.Thread(target=measure, args=(index,), daemon=True) for index in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, report.left_s - 1))
    report.add(devices=found)


def device(torch, place):
    """Return the figures of one device: TFLOP/s, a GPU's GB/s (memory, next GPU, host), and whether a product was wrong."""
    is_gpu = place.type == "cuda"
    if not is_gpu:
        torch.set_num_threads(1)
    size, kind = (SIZE, torch.float16) if is_gpu else (CPU_SIZE, torch.float32)
    made = torch.Generator().manual_seed(0)
    here = [torch.randint(0, 2, (size, size), generator=made).mul_(2).sub_(1).to(torch.float32) for _ in range(2)]
    first, second = (matrix.to(place, kind) for matrix in here)
    product = first @ second
    # Freivalds: a wrong element is missed by one of eight random vectors with probability 1/2, by all with 1/256.
    probe = torch.randint(0, 2, (size, 8), generator=made).mul_(2).sub_(1).to(torch.float32)
    wrong = not torch.equal(product.cpu().to(torch.float32) @ probe, here[0] @ (here[1] @ probe))
    found = {
        "name": torch.cuda.get_device_name(place) if is_gpu else "CPU",
        "wrong": wrong,
        "tflops": 2 * size**3 / 1e12 / best(torch, place, lambda: torch.mm(first, second, out=product)),
    }
    if is_gpu:  # of processors it says more about other programs of the machine
        block = torch.ones(1 << 28, dtype=torch.uint8, device=place)
        target, pinned = torch.empty_like(block), torch.ones(1 << 26, dtype=torch.uint8).pin_memory()
        found["memory"] = 2 * (1 << 28) / 1e9 / best(torch, place, lambda: target.copy_(block))
        if (count := torch.cuda.device_count()) > 1:  # all at once, in a ring
            peer = torch.empty_like(block, device=torch.device("cuda", (place.index + 1) % count))
            found["peer"] = (1 << 28) / 1e9 / best(torch, place, lambda: peer.copy_(block))
        found["host"] = (1 << 26) / 1e9 / best(torch, place, lambda: target[: 1 << 26].copy_(pinned))
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in found.items()}


def best(torch, place, work):
    """Return the seconds that a piece of work takes at best: other programs on the machine make a mean unfair."""
    wait = (lambda: torch.cuda.synchronize(place)) if place.type == "cuda" else (lambda: None)
    times, until = [], monotonic() + BURST_S
    while len(times) < 5 or monotonic() < until:
        count = 1 if not times or place.type == "cpu" else 10  # a first call loads kernels
        wait()
        began = monotonic()
        for _ in range(count):
            work()
        wait()
        times.append((monotonic() - began) / count)
    return min(times[1:])


def link(torch, report):
    """Return GB/s of an all-reduce over all nodes, and of exchanges with the node before and the node after this one."""
    import datetime

    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    place = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(place)
    try:
        patience = datetime.timedelta(seconds=max(1.0, report.left_s - 1))
        dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=size, timeout=patience)
        sent = torch.ones(1 << (24 if on_gpu else 18), dtype=torch.float32, device=place)
        dist.all_reduce(sent)
        found = {"wrong": bool((sent != size).any())}
        amount, received = sent.numel() * 4 / 1e9, torch.empty_like(sent)
        found["all"] = 2 * (size - 1) / size * amount / best_of(torch, place, lambda: dist.all_reduce(sent))
        pairs = []
        # 0-1, 2-3, ... and 1-2, 3-4, ... and last-0: each node has two neighbours, of which one may be the slow one.
        for shift in (0, 1, 2):
            other = rank + 1 if (rank - shift) % 2 == 0 else rank - 1
            if shift == 2:
                other = size - 1 - rank if size > 2 and rank in (0, size - 1) else -1
            if 0 <= other < size:

                def exchange(other=other):
                    wanted = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
                    for each in dist.batch_isend_irecv(wanted):
                        each.wait()

                pairs.append(amount / best_of(torch, place, exchange))
            dist.barrier()
        found["pair"] = max(pairs)
        return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in found.items()}
    except Exception as error:
        return {"error": re.sub(r"\s+", " ", str(error))[:200]}


def best_of(torch, place, work):
    """As `best`, with the same number of calls on each node."""
    times = []
    for _ in range(6 if place.type == "cuda" else 30):
        began = monotonic()
        work()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        times.append(monotonic() - began)
    return min(times[1:])


if __name__ == "__main__":
    main()
