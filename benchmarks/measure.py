"""How the benchmarks measure: whole processes, CPU and wall seconds, interleaved, medians and their spread.

Gates are on CPU seconds where work is compared (they move little on a busy machine) and on wall seconds where waiting is.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
Rows = list[tuple[str, object]]  # of a table
Gates = list[tuple[str, float, float]]  # name, measured, most
PEERS = Path(os.environ.get("CLOUDTRAIN_BENCH_PEERS", ROOT / ".tools" / "peers"))


@dataclass(frozen=True)
class Sample:
    """One run of one command, in seconds."""

    wall: float
    cpu: float


def process(argv: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Sample:
    """Run a command to its end and return its times; CPU is that of the command and the children that it waited for."""
    env = {**(os.environ if env is None else env)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # the warm-up round writes what every installed package has
    began = time.perf_counter()
    child = subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = child.stdout.read() if child.stdout else b""
    _, code, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(code)
    wall = time.perf_counter() - began
    if child.returncode != 0:
        sys.exit(f"{' '.join(argv)} exited with {child.returncode}:\n{output.decode(errors='replace')[-3000:]}")
    return Sample(wall, usage.ru_utime + usage.ru_stime)


def interleaved(things: Mapping[str, Callable[[], Sample]], rounds: int, warm: int = 1) -> dict[str, list[Sample]]:
    """Measure several things in turn, A B C A B C, so that a drift of the machine meets all of them alike."""
    found: dict[str, list[Sample]] = {name: [] for name in things}
    for number in range(rounds + warm):
        for name, thing in things.items():
            sample = thing()
            if number >= warm:
                found[name].append(sample)
    return found


def median(samples: Sequence[Sample], what: str) -> float:
    return statistics.median(getattr(sample, what) for sample in samples)


def table(rows: Sequence[Sequence[object]], head: Sequence[str]) -> str:
    """Return a Markdown table."""
    cells = [list(head), ["---"] * len(head), *[[str(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def spread(samples: Sequence[Sample], what: str) -> str:
    """Return `median (minimum to maximum)`."""
    values = [getattr(sample, what) for sample in samples]
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def peer(name: str, *requirements: str) -> Path:
    """Return the python of a virtual environment that holds a peer, made on first use."""
    python = PEERS / name / "bin" / "python"
    if not (PEERS / name / ".ready").exists():
        shutil.rmtree(PEERS / name, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(PEERS / name)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements], check=True
        )
        (PEERS / name / ".ready").touch()
    return python


def cpu_s(pid: int) -> float:
    """Return the processor time of a process until now, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Return the memory that a process holds, 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def watchers(home: Path) -> list[int]:
    """Return the processes that watch the runs of a home."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"cloudtrain.runs.watching.watch_all" in words and str(home).encode() in words:
            found.append(int(entry.parent.name))
    return found


def wait_until(condition: Callable[[], object], what: str, bound_s: float = 900.0, pause_s: float = 0.2) -> None:
    """Poll until a condition holds; exits where it does not."""
    end = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"{what} did not come within {bound_s:.0f} s")
        time.sleep(pause_s)


def hardware() -> str:
    model = ""
    try:
        text = Path("/proc/cpuinfo").read_text()
        model = next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return f"{os.cpu_count()} x {model}, Python {platform.python_version()}, {platform.system()}"


def pace() -> str:
    """Return what an interpreter that does nothing costs here and now: shared machines of one name differ threefold."""
    samples = [process([sys.executable, "-I", "-S", "-c", "pass"]) for _ in range(9)]
    return f"python -I -S -c pass {median(samples, 'cpu'):.4f} CPU s"


def report(name: str, title: str, body: str, gates: Sequence[tuple[str, float, float]]) -> int:
    """Print a result, keep it in results/ with date and hardware, and return 1 when a gate (name, measured, most) fails."""
    lines = [
        f"# {title}",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {hardware()}, load {os.getloadavg()[0]:.1f}, {pace()}",
        "",
        body,
        "",
    ]
    rows = [(n, f"{got:.3f}", f"{most:.3f}", "met" if got <= most else "MISSED") for n, got, most in gates]
    if rows:
        lines.append(table(rows, ["claim", "measured", "at most", ""]))
    text = "\n".join(lines) + "\n"
    print(text)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{name}.md").write_text(text)
    (HERE / "results" / f"{name}.json").write_text(
        json.dumps({n: [got, most] for n, got, most in gates}, indent=2) + "\n"
    )
    return int(any(got > most for _, got, most in gates))
