"""What the backend ssh does at the edges of its answers, on the machines of test_answers.py: none is reached."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from cloudtrain.backends.ssh import doctor, launch
from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.backends.ssh.machines import make_handle
from cloudtrain.errors import BackendError, BadJob, NotReached, Unreachable
from cloudtrain.nodes import common_folder, transfer
from cloudtrain.source.bundle import Bundle
from tests.backends.ssh.test_answers import FACTS, FOLDER, NAMES, answers_of_a_submit, backend, chosen, fleet, plan

__all__ = ["backend", "fleet", "plan"]  # fixtures


def bundle_of(plan, tmp_path) -> Bundle:
    return Bundle.stored(tmp_path / "bundles", str(plan.bundle["sha256"]))


def test_a_submit_to_several_nodes_looks_whether_the_output_is_one_folder(backend, fleet, plan, tmp_path):
    answers_of_a_submit(fleet)
    fleet["two"].answers["read"] = b"another folder's"
    made = plan(num_nodes=2, output="/shared")
    with pytest.raises(BackendError, match="the output /shared is not the same folder on two and one"):
        backend.submit(made, bundle_of(made, tmp_path))
    assert not fleet["one"].calls("launch"), "nothing was started"
    older = {name: text for name, text in made.request["env"].items() if name != "CLOUDTRAIN_UMASK"}
    with pytest.raises(BackendError, match="not the same folder"):
        launch.check_shared_output(replace(made, request={**made.request, "env": older}), backend.machines[:2])
    assert fleet["one"].calls("write")[-1]["mode"] == 0o600, "a plan of an older version"


def test_what_takes_long_has_a_bound_of_its_own(backend, fleet, plan, tmp_path):
    answers_of_a_submit(fleet)
    made = plan()
    backend.submit(made, bundle_of(made, tmp_path))
    waits = fleet["one"].waits
    assert waits["prepare"] == waits["launch"] == launch.START_S and waits["extract"] == transfer.SEND_S
    for name in NAMES:
        fleet[name].answers |= {"request": {"hosts": ["one"]}, "begun": True}
    assert backend.find("r-a1") and fleet["one"].waits["begun"] == launch.START_S


def test_doctor_goes_on_after_a_machine_that_cannot_listen(fleet):
    for name in NAMES:
        fleet[name].answers |= {"facts": FACTS, "listen": 4001, "reach": None}
    fleet["one"].answers["listen"] = BackendError("no port is free")
    fleet["two"].answers["reach"] = "timed out"
    problems, _ = doctor.check_machines([(name, fleet[name], name) for name in NAMES], "/data")
    assert [problem.message for problem in problems] == [
        "one: cannot listen on any port of one (no port is free)",
        "two does not reach three:4001 of three: timed out",
    ]


def test_a_plan_without_machines_says_how_they_are_named(plan, tmp_path):
    made = plan()
    bundle = bundle_of(made, tmp_path)
    with pytest.raises(BadJob) as caught:
        SshBackend({}, tmp_path).plan(made.stored_job, bundle, "r", 1)
    (problem,) = caught.value.problems
    for found in (problem, *SshBackend({}, tmp_path).check()):
        assert found.path == "options.ssh.hosts"
        assert SshBackend.options().model_validate(yaml.safe_load(found.hint)).hosts, "it can be copied"


def test_what_is_missing_is_said_of_as_many_nodes_as_answer(fleet, plan):
    """Enough nodes answer, and none of them has the checkpoints."""
    fleet["one"].answers["prepare"] = Unreachable("one is away")
    with pytest.raises(NotReached, match="^no node that may have the checkpoints"):
        chosen(plan(2, num_nodes=2))


def test_only_several_nodes_without_an_output_keep_files_of_their_own(plan):
    def said(**changes) -> bool:
        return any("`output` is not set" in note for note in plan(**changes).notes)

    assert said(num_nodes=2) and not said() and not said(num_nodes=2, output="/shared")


def test_all_nodes_whose_files_are_missing_are_named(backend, fleet, tmp_path, monkeypatch):
    monkeypatch.setattr(common_folder, "download_nodes", lambda *_: [1, 0])
    for name in ("one", "two"):
        fleet[name].answers["request"] = {"run_dir": "/home/me/.cloudtrain/runs/r"}
    with pytest.raises(Unreachable, match=r"^node 0 \(one\), node 1 \(two\) cannot be reached: "):
        backend.fetch(make_handle(["one", "two"], FOLDER), tmp_path / "into", ("model",))


def test_each_role_gets_a_machine_that_has_its_gpus(backend, fleet, plan):
    def have(*counts: int) -> None:
        for name, count in zip(NAMES, counts, strict=True):
            fleet[name].answers["command"] = "".join(f"GPU {n}: A100 (UUID: GPU-{n})\n" for n in range(count))

    def of_roles(*gpus: int) -> list[str]:
        made = plan(num_nodes=len(gpus))
        return chosen(replace(made, request={**made.request, "gpus": list(gpus)}))

    have(4, 1, 0)
    assert of_roles(1, 4) == ["two", "one"], "who needs most chooses first"
    have(0, 1, 4)
    assert of_roles(0, 2, 1) == ["one", "three", "two"] and of_roles(1, 0) == ["two", "one"]
    with pytest.raises(BackendError, match="^nodes with 2, 2 GPUs were requested; .*one 0, two 1, three 4"):
        of_roles(2, 2)
    fleet["one"].answers.pop("command")
    assert of_roles(0, 0) == ["one", "two"], "nobody is asked for GPUs"


def test_machines_to_avoid_come_last_and_are_used_where_the_others_are_too_few(backend, plan):
    def order(made) -> list[str]:
        return [host["address"] for host in made.request["hosts"]]

    assert order(backend.avoid(plan(num_nodes=2), ["one"])) == ["two", "three", "one"]
    assert order(backend.avoid(plan(num_nodes=2), [])) == list(NAMES)
    assert backend.avoid(plan(num_nodes=3), ["one"]) == plan(num_nodes=3), "there is no choice"
