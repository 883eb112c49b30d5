"""The local backend: the contract suite, and what is particular to this machine."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.errors import BadJob
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.nodes import supervisor
from cloudtrain.nodes.process import detach
from cloudtrain.source.bundle import Bundle
from cloudtrain.testing.contract import BackendContract
from tests.conftest import processes_of, wait_for


class TestLocal(BackendContract):
    @pytest.fixture
    def connect(self, home: Path):
        return lambda: LocalBackend({}, home / "runs")

    def leftovers(self, handle: str) -> list[str]:
        return processes_of(Path(handle))

    def test_an_attempt_is_its_owners_alone(self, backend, start) -> None:
        before = os.umask(0)
        try:
            handle = start("print('done')")
        finally:
            os.umask(before)
        assert Path(handle).stat().st_mode & 0o777 == 0o700

    # -- true states after a kill -------------------------------------------------------------------------------------

    SLEEPER = "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(600)\n"

    def test_killed_supervisor_is_lost_and_leaves_nothing(self, backend, start) -> None:
        handle = start(self.SLEEPER, processes_per_node=2)
        self.until_line(backend, handle, "pid", times=2)
        supervisor = json.loads((Path(handle) / "node-0" / "status.json").read_text())["pid"]
        os.kill(supervisor, signal.SIGKILL)
        assert self.until_final(backend, handle).state is State.LOST
        self.assert_no_leftovers(handle)

    def test_killed_processes_all_but_the_ranks_are_reaped_by_cancel(self, backend, start) -> None:
        handle = start(self.SLEEPER)
        self.until_line(backend, handle, "pid")
        ranks = {int(line.text.split()[1]) for line in self.script_lines(backend, handle)}
        supervisors = [int(text.split(":")[0]) for text in processes_of(Path(handle))]
        for pid in supervisors:
            if pid not in ranks:
                os.kill(pid, signal.SIGKILL)  # guard and supervisor, so that nobody is left to clean up
        wait_for(lambda: backend.status(handle).state is State.LOST, "LOST")
        backend.cancel(handle)
        self.assert_no_leftovers(handle)
        assert backend.status(handle).state is State.LOST

    def test_killed_rank_is_a_failure_of_the_job(self, backend, start) -> None:
        handle = start(self.SLEEPER, processes_per_node=2)
        self.until_line(backend, handle, "pid", times=2)
        victim = int(self.script_lines(backend, handle)[1].text.split()[1])
        os.kill(victim, signal.SIGKILL)
        status = self.until_final(backend, handle)
        assert (status.state, status.exit_code) == (State.FAILED, 137)
        self.assert_no_leftovers(handle)

    def test_a_starter_killed_before_it_gave_the_secrets(self, backend, prepare, start, monkeypatch) -> None:
        monkeypatch.setenv("PLANTED", "given-the-second-time")
        plan, bundle = prepare("import os; print(len(os.environ['TOKEN']))", secrets={"TOKEN": ["env:PLANTED"]})

        def half(node, argv, env, secrets):
            (node / "started").touch()
            detach(argv, given=b"", log=node / "launcher.out", env=env, cwd=node / "source")

        with monkeypatch.context() as patch:
            patch.setattr(supervisor, "start", half)
            handle = backend.submit(plan, bundle)
        node = Path(handle) / "node-0"
        wait_for(lambda: "ended before" in (node / "launcher.out").read_text(), "its end")
        assert backend.find(plan.attempt_id) is None and not (node / "status.json").exists()
        assert backend.submit(plan, bundle) == handle == backend.find(plan.attempt_id)
        assert self.until_final(backend, handle).state is State.SUCCEEDED
        assert [line.text for line in self.script_lines(backend, handle)] == ["21"]

    def test_killed_node_ends_the_others(self, backend, start) -> None:
        handle = start(self.SLEEPER, num_nodes=2)
        self.until_line(backend, handle, "pid", times=2)
        os.kill(json.loads((Path(handle) / "node-1" / "status.json").read_text())["pid"], signal.SIGKILL)
        assert self.until_final(backend, handle).state is State.LOST
        self.assert_no_leftovers(handle)

    # -- the plan -----------------------------------------------------------------------------------------------------

    def test_golden_plan(self, tmp_path: Path, machine_with) -> None:
        machine_with(4)
        machine_with(4)
        source = tmp_path / "source"
        source.mkdir()
        (source / "train.py").write_text("print(1)\n")
        job = Job.from_dict(
            {
                "name": "golden",
                "source": str(source),
                "entrypoint": "train.py",
                "num_nodes": 2,
                "processes_per_node": 2,
                "hyperparameters": {"learning_rate": "3.0e-4", "layers": [2, 4], "bf16": True, "debug": False},
                "env": {"A": "b"},
                "resources": {"accelerators": "A100-80GB:2"},
            }
        )
        bundle = Bundle.make(source, tmp_path / "bundles")
        plan = LocalBackend({"python": "/usr/bin/python3"}, Path("/home-of-cloudtrain/runs")).plan(
            job, bundle, "golden-run"
        )
        golden = Path(__file__).parents[2] / "golden" / "local" / "two_nodes.json"
        request = json.loads(json.dumps(plan.request))
        for node in request["nodes"]:
            node["env"] = {
                k: v if not k.startswith("CLOUDTRAIN_MANIFEST_") else "${manifest}" for k, v in node["env"].items()
            }
        text = json.dumps({"request": request, "manifest": plan.manifest, "notes": plan.notes}, indent=2) + "\n"
        if os.environ.get("CLOUDTRAIN_WRITE_GOLDEN"):
            golden.parent.mkdir(exist_ok=True)
            golden.write_text(text)
        assert text == golden.read_text()

    def test_gpus_are_disjoint(self, prepare, machine_with) -> None:
        machine_with(4)
        plan, _ = prepare("print(1)", num_nodes=2, resources={"accelerators": "A100-80GB:2"})
        assert [node["env"]["CLOUDTRAIN_GPUS"] for node in plan.request["nodes"]] == ["0,1", "2,3"]

    def test_places_that_this_machine_cannot_reach(self, prepare) -> None:
        inputs = {
            "mounted": {"uri": "s3://bucket/x", "mode": "mount"},
            "web": "https://host/x",
            "nowhere": "gs:///x",
            "fine": "gs://bucket",
            "streamed": {"uri": "hf://datasets/x", "mode": "stream"},
        }
        with pytest.raises(BadJob) as caught:
            prepare("print(1)", output="s3:///x", inputs=inputs)
        assert {problem.path for problem in caught.value.problems} == {
            "output",
            "inputs.mounted.mode",
            "inputs.web.uri",
            "inputs.nowhere.uri",
        }

    def test_output_in_a_store_leaves_the_runs_folder_here(self, prepare, home: Path) -> None:
        plan, _ = prepare("print(1)", output="s3://bucket/x")
        env = plan.request["nodes"][0]["env"]
        assert env["CLOUDTRAIN_RUN_DIR"] == str(home / "runs" / plan.run_id)
        assert plan.manifest["output"] == "s3://bucket/x"

    def test_output_holds_the_runs_files(self, backend, start, tmp_path: Path) -> None:
        script = (
            "import os, pathlib\n"
            "path = pathlib.Path(os.environ['CLOUDTRAIN_MODEL_DIR'])\n"
            "path.mkdir(parents=True, exist_ok=True)\n"
            "(path / 'm').touch()\n"
        )
        handle = start(script, output=str(tmp_path / "out"), run_id="with-output")
        assert self.until_final(backend, handle).state is State.SUCCEEDED
        assert (tmp_path / "out" / "with-output" / "model" / "m").exists()

    def test_environment_of_an_outer_launcher_is_not_taken_over(self, backend, start, monkeypatch) -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.setenv(name, "7")
        handle = start("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])", distributed_env="always")
        self.until_final(backend, handle)
        assert [line.text for line in self.script_lines(backend, handle)] == ["0 1"]

    def test_secret_stands_nowhere(self, backend, start, monkeypatch, home: Path) -> None:
        monkeypatch.setenv("PLANTED", "pl4nted-s3cret")
        handle = start(
            "import os, time\nprint(os.environ['TOKEN'] and 'has it', os.environ['TOKEN'], flush=True)\ntime.sleep(600)\n",
            secrets={"TOKEN": ["env:PLANTED"]},
        )
        self.until_line(backend, handle, "has it")
        ranks = 0
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environ, command = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(handle).encode() not in environ:
                continue
            assert b"pl4nted" not in command
            if command.endswith(b"script.py\0"):
                ranks += b"pl4nted" in environ  # the job's own ranks may have it
            else:
                assert b"pl4nted" not in environ, command
        assert ranks == 1
        backend.cancel(handle)
        self.until_final(backend, handle)
        for path in home.rglob("*"):
            if path.is_file():
                assert b"pl4nted" not in path.read_bytes(), path
