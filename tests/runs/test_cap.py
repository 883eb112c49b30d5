"""A cap on all attempts of a run: it becomes the limit in each platform's own request, and what is used is subtracted."""

from __future__ import annotations

import random
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from cloudtrain import events
from cloudtrain.backends import registry
from cloudtrain.backends.api import Backend, Plan
from cloudtrain.cli import main
from cloudtrain.errors import BadJob, CapReached
from cloudtrain.events import State, Status
from cloudtrain.history.records import AttemptRecord
from cloudtrain.job.job import Job
from cloudtrain.job.units import format_time
from cloudtrain.runs.planning import cap
from cloudtrain.source.bundle import Bundle, File
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.steps import newest, watch

ROLE = "arn:aws:iam::123456789012:role/train"
OPTIONS: dict[str, dict] = {
    "sagemaker": {"region": "us-east-1", "role": ROLE, "bucket": "my-bucket"},
    "vertex": {"project": "my-project", "region": "us-central1", "bucket": "my-bucket"},
    "kubernetes": {"spot_selector": {"spot": "true"}},
    "slurm": {"folder": "/shared", "spot_partition": "cheap"},
    "ssh": {"hosts": [{"address": "one"}, {"address": "two"}]},
    "local": {},
}
PRICED = ("sagemaker", "vertex")
HISTORIES = 40


def backend_of(name: str) -> Backend:
    return registry.create(name, OPTIONS[name], Path("/nowhere"))


def job_of(name: str, **changes) -> Job:
    base = {"name": "capped", "source": "/", "entrypoint": "train.py", "retry": {"max_attempts": 3}}
    if name == "sagemaker":
        base["resources"] = {"accelerators": "A10G:4"}
    if name in ("sagemaker", "vertex", "kubernetes"):
        base["image"] = "img:1"
    if name not in PRICED or name == "sagemaker":
        base.setdefault("resources", {})["usd_per_hour"] = 6.0
    base["resources"] = {**base.get("resources", {}), **changes.pop("resources", {})}
    return Job.from_dict({**base, **changes})


def bundle() -> Bundle:
    return Bundle(Path("x.tar.gz"), "5" * 64, "6" * 64, 1000, (File("train.py", 1, 0o644),), None, False, "/")


def record(plan: Plan, status: Status) -> AttemptRecord:
    return AttemptRecord(plan.attempt_id, plan.run_id, plan.attempt, plan, "handle", "", None, "", status, {})


def native_limit_s(plan: Plan) -> int:
    """Read the limit from the request itself, as the platform would."""
    request = plan.request
    match plan.backend:
        case "sagemaker":
            stopping = request["StoppingCondition"]
            return max(stopping["MaxRuntimeInSeconds"], stopping.get("MaxWaitTimeInSeconds", 0))
        case "vertex":
            scheduling = request["customJob"]["jobSpec"]["scheduling"]
            assert scheduling["disableRetries"], "a restart may begin the timeout anew"
            return int(scheduling["timeout"][:-1])
        case "kubernetes":
            spec = request["manifests"][0]["spec"]
            assert spec["backoffLimit"] == 0, "a pod that is started again has a new deadline"
            return spec["template"]["spec"]["activeDeadlineSeconds"]
        case "slurm":
            assert "--no-requeue" in request["sbatch"], "a requeue begins the time limit anew"
            return 60 * next(int(text[7:]) for text in request["sbatch"] if text.startswith("--time="))
        case _:
            return plan.manifest["max_runtime_s"]


@pytest.mark.parametrize(
    ("name", "spot"), [*((name, False) for name in OPTIONS), ("sagemaker", True), ("kubernetes", True), ("slurm", True)]
)
def test_drawn_histories_never_cost_more_than_the_cap(name: str, spot: bool):
    """Each attempt runs to a drawn end within its own request's limit; some ends are not known afterwards."""
    draw = random.Random(f"{name} {spot}")
    stopped_by_cap = 0
    for history in range(HISTORIES):
        nodes = draw.choice([1, 2])
        amount = draw.uniform(0.5, 30)
        limits = {"max_runtime": f"{draw.randint(10, 600)}m", "grace": f"{draw.randint(5, 60)}s"}
        money = draw.random() < 0.5
        limits |= {"max_cost": f"{amount:.2f} USD"} if money else {"max_total_runtime": f"{int(amount * 3600)}s"}
        resources = {"use_spot": True} if spot else {}
        job, backend = job_of(name, num_nodes=nodes, limits=limits, resources=resources), backend_of(name)
        earlier: list[AttemptRecord] = []
        billed_s, usd = 0.0, 0.0
        for number in range(1, 9):
            try:
                plan = cap.plan_attempt(backend, job, bundle(), f"capped-{history}", number, earlier)
            except (BadJob, CapReached) as error:
                assert isinstance(error, BadJob) is (number == 1) and "limits.max_" in str(error)
                stopped_by_cap += 1
                break
            assert Job.from_dict(plan.job).limits == job.limits, (
                "the next attempt is planned from the job as it was asked for"
            )
            limit_s = native_limit_s(plan)
            used_s = draw.choice([limit_s, draw.uniform(0, limit_s)])  # what a platform lets it use
            known = draw.random() < 0.7
            if known and draw.random() < 0.5:
                status = Status(State.PREEMPTED, 75, billable_s=int(used_s * nodes) + 1)
            elif known:
                status = Status(State.PREEMPTED, 75, "", format_time(1e9), format_time(1e9 + used_s))
            else:
                status = Status(State.LOST, None, "", format_time(1e9), None)
            earlier.append(record(plan, status))
            billed_s += used_s
            usd += used_s / 3600 * (plan.price or {}).get("usd_per_hour", 0)
            assert plan.at_most and (plan.at_most["usd"] is None or plan.at_most["usd"] <= amount + 0.01 or not money)
        if money:
            assert usd <= amount + 0.01, (name, history)
        else:
            assert billed_s <= int(amount * 3600) + 1, (name, history)
    assert stopped_by_cap > HISTORIES / 4, "most histories reach their cap"


@pytest.mark.parametrize("name", ["sagemaker", "vertex", "kubernetes", "slurm"])
def test_without_a_cap_a_request_is_what_the_backend_plans(name: str):
    backend, job = backend_of(name), job_of(name)
    plan = cap.plan_attempt(backend, job, bundle(), "a-run")
    assert plan.request == backend.plan(job, bundle(), "a-run").request


def test_the_worst_case_is_of_the_limits_in_the_request():
    job = job_of("kubernetes", num_nodes=2, limits={"max_runtime": "1h", "grace": "30s"})
    plan = cap.plan_attempt(backend_of("kubernetes"), job, bundle(), "a-run")
    each_s = (
        3600 + 30 + 90 + 900 + 1800 + 30 + 90
    )  # a pod's deadline with the wait for the other node, its grace period
    assert plan.at_most is not None and (plan.at_most["attempts"], plan.at_most["attempt_s"]) == (3, each_s)
    assert plan.at_most["usd"] == pytest.approx(3 * each_s / 3600 * 12.0, abs=0.01)


def test_a_platform_that_restarts_jobs_says_that_nothing_bounds_them():
    plan = cap.plan_attempt(backend_of("vertex"), job_of("vertex"), bundle(), "a-run")
    assert (
        plan.at_most is not None and plan.at_most["usd"] is None and "resets its timeout" in plan.at_most["unbounded"]
    )


def test_money_needs_a_price():
    job = Job.from_dict({"name": "x", "source": "/", "entrypoint": "t.py", "limits": {"max_cost": "5 USD"}})
    with pytest.raises(BadJob, match=r"limits.max_cost.*price"):
        cap.plan_attempt(backend_of("local"), job, bundle(), "a-run")


def test_a_cap_that_is_too_small_names_the_smallest_that_is_enough(tmp_path: Path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    options = "".join(f'{name} = "{value}"\n' for name, value in OPTIONS["sagemaker"].items())
    (tmp_path / "cloudtrain.toml").write_text(f'[targets.prod]\nbackend = "sagemaker"\n{options}')
    (tmp_path / "job.yaml").write_text("entrypoint: train.py\nimage: img:1\nresources: {instance_type: ml.g5.xlarge}\n")
    for limit in ("max_cost=0.1 USD", "max_total_runtime=10m"):
        code, _, refused = cli("plan", "-t", "prod", "--set", f"limits.{limit}")
        assert code == 2
        found = re.search(
            r"raise it to (.+) or more(?:, at [\d.]+ USD an hour for 1 x ml.g5.xlarge, us-east-1)?\)", refused
        )
        assert found, refused
        key = f"limits.{limit.partition('=')[0]}"
        code, shown, _ = cli("plan", "-t", "prod", "--set", f"{key}={found[1]}")
        assert code == 0 and re.search(rf"^  limit +at most 5m.* \({key}\), 1 attempt", shown, re.MULTILINE), shown
    assert "(limits.max_runtime)" in cli("plan", "-t", "prod")[1]


def test_the_wait_for_spot_machines_is_not_billed_and_the_plan_names_the_cost_without_it(tmp_path, monkeypatch, cli):
    page = (Path(__file__).parents[2] / "docs" / "how" / "spot.md").read_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    options = "".join(f'{name} = "{value}"\n' for name, value in OPTIONS["sagemaker"].items())
    (tmp_path / "cloudtrain.toml").write_text(f'[targets.prod]\nbackend = "sagemaker"\n{options}')
    (tmp_path / "job.yaml").write_text(
        "entrypoint: train.py\nimage: img:1\nresources: {instance_type: ml.g5.2xlarge}\n"
    )

    def rows(*settings: str) -> str:
        words = [word for setting in ("limits.max_runtime=4h", *settings) for word in ("--set", setting)]
        code, shown, _ = cli("plan", "-t", "prod", *words)
        assert code == 0
        return shown

    (cost,) = re.findall(r"^  cost .*$", page, re.MULTILINE)
    spot, capped = rows("resources.use_spot=true"), rows("resources.use_spot=true", "limits.max_cost=6 USD")
    assert cost in spot
    (without,) = re.findall(r", ([\d.]+ USD) without the wait", cost)
    assert f"at most {without} (1 attempt of 4h" in rows(), "it is that of machines on demand"
    assert "without the wait" not in capped and "limits.max_cost waiting for spot machines counts" in capped
    (limit,) = re.findall(r"^  limit .*$", page, re.MULTILINE)
    assert limit in capped


def test_a_resume_names_the_cap_that_is_enough():
    job, backend = job_of("sagemaker", limits={"max_cost": "12 USD", "max_runtime": "1h"}), backend_of("sagemaker")
    first = cap.plan_attempt(backend, job, bundle(), "a-run")
    earlier = [record(first, Status(State.PREEMPTED, 75, billable_s=7000))]
    with pytest.raises(CapReached) as refused:
        cap.plan_attempt(backend, job, bundle(), "a-run", 2, earlier)
    (enough,) = re.findall(r'--set "limits.max_cost=(.+?)" raises it enough, at 6 USD an hour', refused.value.hint)
    higher = job_of("sagemaker", limits={"max_cost": enough, "max_runtime": "1h"})
    assert cap.plan_attempt(backend, higher, bundle(), "a-run", 2, earlier).manifest["max_runtime_s"] in range(300, 310)


def test_a_queue_that_starts_jobs_again_holds_the_cap_itself():
    """Kueue may suspend a Job and start it again, with new deadlines: under a cap it counts the time of all starts."""
    backend = registry.create("kubernetes", {**OPTIONS["kubernetes"], "queue": "gpus"}, Path("/nowhere"))
    uncapped = cap.plan_attempt(backend, job_of("kubernetes"), bundle(), "a-run")
    assert uncapped.at_most is not None and "a queue may suspend" in uncapped.at_most["unbounded"]
    job = job_of("kubernetes", limits={"max_total_runtime": "6h", "max_runtime": "9h"})
    plan = cap.plan_attempt(backend, job, bundle(), "a-run")
    pod = plan.request["manifests"][0]["spec"]["template"]["spec"]
    seconds = plan.request["manifests"][0]["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"]
    assert int(seconds) == pod["activeDeadlineSeconds"] + pod["terminationGracePeriodSeconds"] <= 6 * 3600


def test_pods_without_a_deadline_cannot_be_capped():
    overlay = {"spec": {"template": {"spec": {"activeDeadlineSeconds": None}}}}
    backend = registry.create("kubernetes", {**OPTIONS["kubernetes"], "overlay": overlay}, Path("/nowhere"))
    with pytest.raises(BadJob, match="removes the pods' activeDeadlineSeconds"):
        cap.plan_attempt(backend, job_of("kubernetes", limits={"max_total_runtime": "6h"}), bundle(), "a-run")


def test_machines_that_outlive_their_job_cannot_be_capped():
    backend = registry.create("vertex", {**OPTIONS["vertex"], "persistent_resource": "mine"}, Path("/nowhere"))
    with pytest.raises(BadJob, match="billed after the job"):
        cap.plan_attempt(backend, job_of("vertex", limits={"max_total_runtime": "6h"}), bundle(), "a-run")


@pytest.mark.parametrize("option", [{"keep_alive_s": 600}, {"max_wait": "12h"}])
def test_what_a_cap_does_not_cover_is_refused(option: dict):
    job = job_of("sagemaker", limits={"max_cost": "50 USD"}, resources={"use_spot": "max_wait" in option})
    backend = registry.create("sagemaker", {**OPTIONS["sagemaker"], **option}, Path("/nowhere"))
    with pytest.raises(BadJob, match="cannot be combined with limits.max_cost"):
        cap.plan_attempt(backend, job, bundle(), "a-run")


def test_an_attempt_that_never_started_has_used_nothing():
    plan = cap.plan_attempt(backend_of("slurm"), job_of("slurm"), bundle(), "a-run")
    refused = Status(State.FAILED, None, "no machines", event="capacity")
    limit = lambda old: cap.limit_of(backend_of("slurm"), old)  # noqa: E731
    assert cap.spent([record(plan, refused)], limit) == cap.Spent(0.0, 0.0)
    late = Status(State.PREEMPTED, 75, "1 of 2 nodes joined within 60 s; missing: 1", event="capacity")
    for unknown in (Status(State.LOST), late):  # of the second, some nodes waited for the others
        assert cap.spent([record(plan, unknown)], limit).seconds == limit(plan).seconds


def test_a_loss_counts_as_it_ran_only_where_its_end_was_reported():
    plan = cap.plan_attempt(backend_of("slurm"), job_of("slurm"), bundle(), "a-run")
    limit = lambda old: cap.limit_of(backend_of("slurm"), old)  # noqa: E731
    noticed = Status(State.LOST, None, "it no longer exists", format_time(1e9), format_time(1e9 + 600))
    assert cap.spent([record(plan, noticed)], limit).seconds == limit(plan).seconds
    reported = replace(noticed, event=events.ENDED)
    assert cap.spent([record(plan, reported)], limit).seconds == 600 + limit(plan).after_end_s


def test_a_run_ends_when_its_cap_is_used_up_and_goes_on_with_a_higher_one(memory, submitter, job, capsys):
    limits = {"max_runtime": "2h", "grace": "10s", "max_total_runtime": "3h"}
    run = submitter.submit(job.replace(limits=limits, retry={"max_attempts": 5}))
    assert run.attempts[0].plan.manifest["max_runtime_s"] == 7200
    MemoryBackend.say(newest(run), events.format("checkpoint", {"step": 1}))
    MemoryBackend.finish(newest(run), State.PREEMPTED, 75, billable_s=7000)
    watch(run)
    assert run.attempts[1].plan.manifest["max_runtime_s"] == 3 * 3600 - 7000 - 10
    MemoryBackend.say(newest(run), events.format("checkpoint", {"step": 2}))
    MemoryBackend.finish(newest(run), State.PREEMPTED, 75, billable_s=3700)
    watch(run)
    status = run.record.status
    assert status.state is State.TIMED_OUT and len(run.attempts) == 2, "100 s are too few for another attempt"
    assert "limits.max_total_runtime is 3h" in status.reason and "cloudtrain resume" in status.reason
    with pytest.raises(CapReached):
        run.resume()
    assert main(["resume", run.run_id, "--set", "hyperparameters.lr=9"]) == 2
    assert "not hyperparameters.lr=9" in capsys.readouterr().err
    run.resume(sets=["limits.max_total_runtime=4h"])
    assert run.attempts[2].plan.manifest["max_runtime_s"] == 4 * 3600 - 10_700 - 10


def test_a_targets_price_is_that_of_its_machines(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "cloudtrain.toml").write_text(
        '[targets.lab]\nbackend = "slurm"\nfolder = "/shared"\nusd_per_hour = 2.5\n'
    )
    (tmp_path / "job.yaml").write_text("entrypoint: train.py\nnum_nodes: 2\nlimits: {max_runtime: 55m}\n")
    assert main(["plan", "-t", "lab"]) == 0
    shown = capsys.readouterr().out
    assert "5.0 USD an hour (usd_per_hour of the target lab)" in shown
    assert "at most 5.04 USD (1 attempt of 1h on 2 nodes)" in shown, "55 minutes, 5 of Slurm's margin, 30 s of KillWait"


def test_a_target_may_be_free(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "cloudtrain.toml").write_text(
        '[targets.lab]\nbackend = "slurm"\nfolder = "/shared"\nusd_per_hour = 0\n'
    )
    (tmp_path / "job.yaml").write_text("entrypoint: train.py\nlimits: {max_runtime: 55m, max_cost: 1 USD}\n")
    assert main(["plan", "-t", "lab"]) == 0
    assert "at most 0.00 USD" in capsys.readouterr().out
    assert main(["plan", "-t", "lab", "--set", "resources.usd_per_hour=-1"]) == 2


def test_a_number_without_a_currency_is_called_a_number():
    with pytest.raises(BadJob, match=r"is not an amount of money: the number 20 \(write a currency: 20 USD\)"):
        Job.from_dict({"name": "x", "source": "/", "entrypoint": "t.py", "limits": {"max_cost": 20}})


@pytest.mark.parametrize("text", ["40", "40 EUR", "-1 USD", "0 USD", "USD", "40 USD more"])
def test_an_amount_of_money_names_its_currency(text: str):
    with pytest.raises(BadJob, match="40 USD"):
        Job.from_dict({"name": "x", "source": "/", "entrypoint": "t.py", "limits": {"max_cost": text}})


def test_plans_survive_json():
    plan = cap.plan_attempt(backend_of("slurm"), job_of("slurm", limits={"max_cost": "9 USD"}), bundle(), "a-run")
    assert Plan.from_json(plan.to_json()) == replace(plan)


@pytest.mark.parametrize(
    ("extra_s", "ran_s", "left", "used"), [(0.0, 63, "18.50", "31.50"), (30.0, 39, "15.50", "34.50")]
)
def test_show_and_resume_have_one_figure_of_a_cap(
    memory, submitter, job, capsys, monkeypatch, extra_s: float, ran_s: float, left: str, used: str
):
    of_launcher = MemoryBackend.time_limit
    monkeypatch.setattr(MemoryBackend, "time_limit", lambda *a: replace(of_launcher(*a), after_end_s=extra_s))
    limits = {"max_runtime": "40s", "grace": "30s", "max_cost": "50 USD"}
    run = submitter.submit(job.replace(limits=limits, resources={"usd_per_hour": 1800.0}))
    MemoryBackend.finish(newest(run), State.TIMED_OUT, 75)
    watch(run)
    with run.store.database.write() as db:
        times = (format_time(1e9), format_time(1e9 + ran_s), newest(run))
        db.execute("UPDATE attempts SET started_at = ?, ended_at = ? WHERE attempt_id = ?", times)
    assert main(["show", run.run_id]) == 0
    shown = capsys.readouterr().out
    assert f"50 USD (limits.max_cost), {left} USD left" in shown
    spent_usd, margin_usd = ran_s * 0.5, 15.0 if extra_s else 0.0
    assert f"{spent_usd:.2f} USD (" in shown and spent_usd + margin_usd + float(left) == 50.0
    assert (f"may bill: {margin_usd:.2f} USD)" in shown) == bool(extra_s)
    with pytest.raises(CapReached) as refused:
        run.resume()
    assert f"of which {used} USD are used" in str(refused.value)
    says_so = "each ended attempt counts 30 s more, which its platform may bill"
    assert (says_so in shown, says_so in str(refused.value)) == (bool(extra_s), bool(extra_s))


def ended_at_its_limit(submitter, job, ran_s: int, **limits: str):
    """Return a run of 0.5 USD a second whose first attempt reached its time limit."""
    limits = {"grace": "10s", **limits}
    run = submitter.submit(job.replace(limits=limits, resources={"usd_per_hour": 1800.0}))
    MemoryBackend.finish(newest(run), State.TIMED_OUT, 75)
    with run.store.database.write() as db:
        times = (format_time(1e9), format_time(1e9 + ran_s), newest(run))
        db.execute("UPDATE attempts SET started_at = ?, ended_at = ? WHERE attempt_id = ?", times)
    watch(run)
    return run


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_runtime": "90s"}, "--set limits.max_runtime=3m"),
        ({"max_runtime": "90s", "max_cost": "500 USD"}, "--set limits.max_runtime=3m"),
        ({"max_runtime": "20s", "max_cost": "16 USD"}, '--set limits.max_runtime=40s --set "limits.max_cost='),
        ({"max_runtime": "1h", "max_cost": "200 USD"}, '--set "limits.max_cost=400 USD"'),
        ({"max_runtime": "1h", "max_total_runtime": "10m"}, "--set limits.max_total_runtime=20m"),
    ],
)
def test_the_advice_after_a_time_limit_can_be_typed(memory, submitter, job, capsys, limits: dict, words: str):
    run = ended_at_its_limit(submitter, job, 30, **limits)
    assert main(["show", run.run_id]) == 0
    shown = capsys.readouterr().out
    command = re.search(r"raise the limit: cloudtrain (resume .*)", shown)
    assert command and f"{run.run_id} {words}" in command[1], shown
    assert f"cloudtrain rerun {run.run_id} {words}" in shown, "nothing was saved"
    assert main([*shlex.split(command[1]), "--yes"]) == 0


def test_after_a_time_limit_a_run_with_a_checkpoint_is_resumed(memory, submitter, job, capsys):
    run = submitter.submit(job.replace(limits={"max_runtime": "90s"}))
    MemoryBackend.say(newest(run), events.format("checkpoint", {"step": 1}))
    MemoryBackend.finish(newest(run), State.TIMED_OUT, 75)
    watch(run)
    assert main(["show", run.run_id]) == 0
    shown = capsys.readouterr().out
    assert f"cloudtrain resume {run.run_id} --set limits.max_runtime=3m\n" in shown and "cloudtrain rerun" not in shown
