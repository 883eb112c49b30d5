"""The check of two real nodes: who is broken ends the attempt before a rank starts, who hangs is waited for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.entrypoints.launching import Attempt

GPU = "0, NVIDIA H100 80GB HBM3, 550.54.15, Enabled, 0, 16, 0x0000000000000001, 00000000:1B:00.0"
# By the node's rank, as the program that measures has it: a node has a machine of its own, and this is one machine.
SMI = f"""#!/bin/sh
case "$1" in
-L) echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0000)' ;;
--query-gpu*) env > "$SEEN.$RANK"; echo '{GPU}' ;;
--query-remapped-rows*) [ "$RANK" = "$BAD" ] && echo '00000000:1B:00.0, Yes, No' || echo '00000000:1B:00.0, No, No' ;;
esac
"""


def attempt(tmp_path: Path, smi: str = SMI, bad: str = "", torch: bool = False, **manifest) -> Attempt:
    tools, modules = tmp_path / "tools", tmp_path / "modules"
    tools.mkdir()
    modules.mkdir()
    (tools / "nvidia-smi").write_text(smi)
    (tools / "nvidia-smi").chmod(0o755)
    if not torch:
        (modules / "torch.py").write_text("raise ImportError('there is none')")
    environ = {"PATH": f"{tools}:/usr/bin:/bin", "BAD": bad, "SEEN": str(tmp_path / "seen"), "CLOUDTRAIN_GPUS": "0"}
    environ |= {"PYTHONPATH": str(modules)}
    manifest = {"gpus_per_node": 1, "health": "strict", **manifest}
    return Attempt(tmp_path, "print('trains')", nodes=2, environ=environ, **manifest)


def test_a_broken_node_is_named_and_no_rank_starts(tmp_path):
    with attempt(tmp_path, bad="1") as made:
        assert made.run() == [69, 69]
        said = [made.status(node)["reason"] for node in range(2)]
        assert said[0] == said[1] and said[0].startswith("node 1 (") and made.status(0)["state"] == "LOST"
        assert said[0].endswith(
            "failed the health check: GPU 0: a memory row waits to be remapped (nvidia-smi): it needs a reset"
        )
        assert made.texts(0) == [] and made.texts(1, 1) == []
        assert [event["gpus"][0]["pending"] for node in range(2) for event in made.events("health", node)] == [
            False,
            True,
        ]


def test_healthy_nodes_start_and_the_program_that_measures_has_no_secret(tmp_path):
    stdin = {"secrets": {"env:TOKEN": "hidden-token"}}
    with attempt(tmp_path, secrets={"TOKEN": ["env:TOKEN"]}, stdin=stdin) as made:
        assert made.run() == [0, 0]
        assert made.texts(0) == ["trains"] and made.texts(1, 1) == ["trains"]
        line = "health check: 2 nodes without a fault; nothing was measured, as torch cannot be imported"
        assert made.texts(-1).count(line) == 1 and line not in made.texts(-1, 1)
        for rank in range(2):
            seen = (tmp_path / f"seen.{rank}").read_text()
            assert "CUDA_VISIBLE_DEVICES=0" in seen and "hidden-token" not in seen


def test_a_node_whose_driver_hangs_is_not_waited_for_long(tmp_path):
    smi = '#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: NVIDIA H100 (UUID: GPU-0000)" || exec sleep 600\n'
    with attempt(tmp_path, smi, health="strict").set("health/check", "LIMIT_S", "2.0") as made:
        assert made.run() == [69, 69]
        assert "it has not reported: the check did not finish in time" in made.status(0)["reason"]


@pytest.mark.train
def test_processors_and_the_link_are_measured_with_torch(tmp_path):
    with attempt(tmp_path, "#!/bin/sh\nexit 1\n", torch=True, gpus_per_node=0) as made:
        made.run()
        [first], [second] = (made.events("health", node) for node in range(2))
        for figures in (first, second):
            assert figures["devices"][0]["tflops"] > 0 and figures["devices"][0]["wrong"] is False, figures
            assert figures["link"]["all"] > 0 and figures["link"]["wrong"] is False, figures


SLOW = """\
import os, sys, time
from pathlib import Path
log = Path(os.environ["CLOUDTRAIN_NODE_DIR"]).parent / "node-0" / "log"
for step in range(10_000):
    print("step", step * (1 if os.environ["RANK"] == "1" else 5), flush=True)
    time.sleep(0.1)
    if b" straggler: " in log.read_bytes():
        sys.exit(0)
sys.exit(3)
"""


def test_a_node_whose_steps_are_slower_is_named(tmp_path):
    """On two real nodes, with ten minutes and the times between reports made short."""
    with Attempt(tmp_path, SLOW, nodes=2, health="off") as made:
        for name, seconds in (("SLOW_S", 2.0), ("MARK_S", 0.2)):
            made.set("health/stragglers", name, seconds)
        made.set("usage", "EVERY_S", 0.5)
        assert made.run() == [0, 0]
        alarm = made.events("alarm")[0]
        assert alarm["straggler"] == 1 and alarm["reason"].startswith("straggler: node 1 (")
        assert alarm["reason"] in made.texts(-1) and "slower than the median of the nodes" in alarm["reason"]
