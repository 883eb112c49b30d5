"""What goes wrong on Akash: lost answers, no bids, providers that vanish or close a lease, notice, restarts, no money."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.akash.client import Console
from cloudtrain.backends.attached.run import AttachedRun
from cloudtrain.errors import BackendError, NoCapacity, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.simulators.http import Fault
from tests.backends.akash.ground import CHEAP, SOLID, Ground, environment, ground
from tests.conftest import wait_for
from tests.simulators.akash.market import Provider
from tests.simulators.akash.server import API_KEY, Behavior

SLEEP = "import time\nprint('there', flush=True)\ntime.sleep(600)\n"
CREATE, LEASES = "/v1/deployments$", "/v1/leases$"


@pytest.fixture(autouse=True)
def exported(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Ground]:
    """A network that runs services."""
    with ground(tmp_path) as made:
        yield made


@pytest.fixture
def paper(tmp_path: Path) -> Iterator[Ground]:
    """A network that takes deployments and runs nothing."""
    with ground(tmp_path, behavior=Behavior(execute=False)) as made:
        yield made


def ended(made: Ground, handle: str, **options: Any) -> Status:
    backend = made.backend(**options)
    return wait_for(lambda: (status := backend.status(handle)).state.final and status, "its end")


def running(made: Ground, handle: str) -> None:
    backend = made.backend()
    wait_for(lambda: any(line.text == "there" for line in backend.logs(handle)), "its first line")
    wait_for(lambda: backend.status(handle).state is State.RUNNING, "its start")


# -- exactly once ------------------------------------------------------------------------------------------------------


def test_a_lost_answer_makes_no_second_deployment(paper: Ground) -> None:
    paper.simulator.faults.append(Fault("POST", CREATE, 0, after=True))
    plan, bundle = paper.plan("print(1)")
    handle = paper.backend().submit(plan, bundle)
    assert len(paper.simulator.deployments) == paper.posts() == 1
    assert paper.backend().find(plan.attempt_id) == handle == paper.backend().submit(plan, bundle)
    assert paper.posts() == 1


@pytest.mark.parametrize("status", [0, 500, 429, 503])
def test_a_deployment_that_was_not_made_is_asked_for_again(paper: Ground, status: int) -> None:
    paper.simulator.faults.append(Fault("POST", CREATE, status))
    plan, bundle = paper.plan("print(1)")
    with pytest.raises(Unreachable):
        paper.backend().submit(plan, bundle)
    assert paper.simulator.deployments == {} and paper.backend().find(plan.attempt_id) is None
    paper.backend().submit(plan, bundle)
    assert len(paper.simulator.active()) == 1


def test_nothing_is_sent_again_before_the_list_has_answered(paper: Ground) -> None:
    """The POST is carried out, its answer is lost, and the list does not answer either."""
    listed = "/v1/deployments\\?"
    paper.simulator.faults += [Fault("POST", CREATE, 0, after=True), Fault("GET", listed, 500, times=10)]
    plan, bundle = paper.plan("print(1)")
    for _ in range(2):
        with pytest.raises(Unreachable):
            paper.backend().submit(plan, bundle)
    assert paper.posts() == 1
    handle = paper.backend().submit(plan, bundle)
    assert list(paper.simulator.deployments) == [handle.rpartition("/")[2]] and paper.posts() == 1


def test_a_lease_whose_answers_are_lost_runs_once(live: Ground) -> None:
    live.simulator.faults.append(Fault("POST", LEASES, 0, after=True, times=5))
    plan, bundle = live.plan(SLEEP)
    with pytest.raises(Unreachable):
        live.backend().submit(plan, bundle)
    assert live.backend().find(plan.attempt_id) is None, "it is not known whether the manifest arrived"
    handle = live.backend().submit(plan, bundle)
    running(live, handle)
    assert len(live.simulator.leases) == live.posts() == 1
    assert live.simulator.leases[handle.rpartition("/")[2]].starts == {"node-0": 1}


def test_what_an_interrupted_submission_left_is_closed(paper: Ground) -> None:
    paper.simulator.faults.append(Fault("GET", "/v1/bids", 500, times=5))
    plan, bundle = paper.plan("print(1)")
    with pytest.raises(Unreachable):
        paper.backend().submit(plan, bundle)
    assert len(paper.simulator.active()) == 1
    paper.backend().discard(plan.attempt_id)
    assert paper.simulator.active() == []


# -- refusals and bids -------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_a_refusal(paper: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, bundle = paper.plan("print(1)")
    monkeypatch.setenv("AKASH_API_KEY", "another")
    with pytest.raises(BackendError, match="does not accept the API key") as raised:
        paper.backend().submit(plan, bundle)
    assert not isinstance(raised.value, Unreachable)
    monkeypatch.delenv("AKASH_API_KEY")
    with pytest.raises(BackendError, match="AKASH_API_KEY is not set"):
        paper.backend().submit(plan, bundle)


def test_an_account_without_money_is_a_refusal(paper: Ground) -> None:
    paper.simulator.behavior.funds = False
    with pytest.raises(BackendError, match="too little money") as raised:
        paper.backend().submit(*paper.plan("print(1)"))
    assert not isinstance(raised.value, Unreachable)


def test_a_key_file_that_others_can_read_is_refused(paper: Ground) -> None:
    path = paper.folder / "key"
    path.write_text(f"{API_KEY}\n")
    path.chmod(0o644)
    with pytest.raises(BackendError, match="can be read by others"):
        paper.backend(api_key=f"file:{path}").submit(*paper.plan("print(1)"))
    path.chmod(0o600)
    assert paper.backend(api_key=f"file:{path}").submit(*paper.plan("print(1)"))


@pytest.mark.parametrize(
    ("options", "limits"),
    [({"bid_wait": "1s"}, {}), ({"bid_wait": "1h"}, {"max_wait": "1s"})],
    ids=["bid_wait", "max_wait goes before it"],
)
def test_bids_that_never_come(paper: Ground, options: dict, limits: dict) -> None:
    for provider in paper.simulator.providers:
        provider.silent = True
    with pytest.raises(NoCapacity, match="no bid has come"):
        paper.backend(**options).submit(*paper.plan("print(1)", limits=limits))
    assert paper.simulator.active() == [], "it is not billed"


def test_bids_above_the_ceiling_are_not_taken(paper: Ground) -> None:
    for provider in paper.simulator.providers:
        provider.over_ceiling = True
    with pytest.raises(NoCapacity, match=r"cheap\.example: 0\.5 USD/h, uptime 99% \(over the ceiling of 0\.40 USD/h\)"):
        options = {"max_usd_per_hour": 0.4, "bid_wait": "1s"}
        paper.backend(**options).submit(*paper.plan("print(1)", akash=options))
    assert paper.simulator.active() == []


def test_the_cheapest_bid_that_may_be_taken_is_taken(tmp_path: Path) -> None:
    a100, h100 = "vendor/nvidia/model/a100/ram/80Gi/interface/sxm", "vendor/nvidia/model/h100/ram/80Gi"
    providers = [
        Provider("akash1flaky", "flaky.example", 0.1, (a100,), uptime=0.5),
        Provider("akash1other", "other.example", 0.2, (h100,)),
        Provider("akash1avoided", "avoided.example", 0.3, (a100,)),
        Provider("akash1offline", "offline.example", 0.4, (a100,), online=False),
        Provider("akash1taken", "taken.example", 0.5, (a100,), uptime=1.0),
        Provider("akash1same", "same.example", 0.5, (a100,), uptime=0.95),
        Provider("akash1dear", "dear.example", 0.6, (a100,), bid_after_s=0.1),
    ]
    with ground(tmp_path, providers, Behavior(execute=False)) as made:
        backend = made.backend(avoid=["akash1avoided"])
        handle = backend.submit(*made.plan("print(1)", num_nodes=2, resources={"accelerators": "A100-80GB:1"}))
        status = backend.status(handle)
    assert status.state is State.STARTING
    assert status.reason.startswith("lease with taken.example at 1 USD an hour; bids: taken.example: 1 USD/h, a100/")
    rows = {row["name"]: row["why_not"] for row in backend.lease(handle)["bids"]}
    assert rows == {
        "taken.example": "", "same.example": "", "dear.example": "", "flaky.example": "uptime 50% in 7 days",
        "avoided.example": "named in options.akash.avoid", "offline.example": "the provider is offline",
    }  # fmt: skip


def test_a_provider_that_gives_no_notice_is_not_asked_for_it(tmp_path: Path) -> None:
    providers = [
        Provider("akash1none", "none.example", 0.1),
        Provider("akash1hour", "hour.example", 0.2, reclamation_s=3600),
        Provider("akash1day", "day.example", 0.3, reclamation_s=86400),
    ]
    with ground(tmp_path, providers, Behavior(execute=False)) as made:
        options = {"reclamation_window": "24h"}
        handle = made.backend(**options).submit(*made.plan("print(1)", akash=options))
        assert made.backend().status(handle).reason.startswith("lease with day.example")


def test_the_next_bid_is_tried_where_the_first_one_is_gone(paper: Ground) -> None:
    paper.simulator.faults.append(Fault("POST", LEASES, 400, "bid not open"))
    handle = paper.backend().submit(*paper.plan("print(1)"))
    (lease,) = paper.simulator.deployments[handle.rpartition("/")[2]]["leases"]
    assert lease["id"]["provider"] == SOLID


def test_a_manifest_that_the_provider_refuses(paper: Ground) -> None:
    paper.simulator.providers[0].refuses_manifest = True
    with pytest.raises(NoCapacity, match="manifest version validation failed"):
        paper.backend().submit(*paper.plan("print(1)"))
    assert paper.simulator.active() == []


# -- ends that the job did not make ------------------------------------------------------------------------------------


def test_a_provider_that_vanishes(live: Ground) -> None:
    plan, bundle = live.plan(SLEEP)
    handle = live.backend().submit(plan, bundle)
    running(live, handle)
    live.simulator.vanish(CHEAP)
    waiting = live.backend(lost_after="10m").status(handle)
    assert (waiting.state, waiting.reason) == (State.RUNNING, "the provider cheap.example does not answer")
    status = ended(live, handle, lost_after="1s")
    assert status.state is State.LOST and "cheap.example does not answer" in status.reason
    assert live.simulator.active() == [], "the lease of a lost provider is closed"
    assert any(line.text == "there" for line in live.backend().logs(handle)), "its log is in the store"


@pytest.mark.parametrize(
    ("closing", "state", "reason"),
    [
        ({}, State.PREEMPTED, "the lease with cheap.example was closed (lease_closed_reason_unstable)"),
        (
            {"state": "insufficient_funds"},
            State.FAILED,
            "the account's funds are used up, so that the lease was closed",
        ),
    ],
)
def test_a_lease_that_others_close(paper: Ground, closing: dict[str, str], state: State, reason: str) -> None:
    handle = paper.backend().submit(*paper.plan("print(1)"))
    paper.simulator.close_lease(handle.rpartition("/")[2], **closing)
    assert paper.backend(settle_s=600.0).status(handle).state is State.STOPPING, "its last words may come"
    status = ended(paper, handle, settle_s=0.0)
    assert (status.state, status.reason) == (state, reason)


def test_nothing_is_waited_for_where_no_container_has_begun(paper: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled before an image was pulled: no launcher is there that could upload its last lines."""
    begun, unbegun = (paper.backend().submit(*paper.plan("print(1)", run_id=run_id)) for run_id in ("begun", "unbegun"))
    paper.store.put("ct/akash/begun-a1/began-0", b"1")
    backend = paper.backend(settle_s=600.0)
    for handle in (begun, unbegun):
        backend.cancel(handle)
        assert backend.status(handle).state is State.STOPPING
    monkeypatch.setattr("cloudtrain.backends.akash.status.UNBEGUN_S", 0.0)
    wait_for(lambda: backend.status(unbegun).state is State.CANCELLED, "its end")  # the Console's clock counts seconds
    assert backend.status(begun).state is State.STOPPING and paper.simulator.active() == []


def test_a_lease_that_the_provider_closes_lets_ranks_save(live: Ground) -> None:
    script = (
        "import signal, sys, time\n"
        "def leave(*_):\n    print('saved', flush=True)\n    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, leave)\nprint('there', flush=True)\ntime.sleep(600)\n"
    )
    handle = live.backend().submit(*live.plan(script))
    running(live, handle)
    live.simulator.reclaim(handle.rpartition("/")[2], 3600)
    noticed = live.backend().status(handle)
    assert noticed.state is State.RUNNING and noticed.reason.startswith("the provider cheap.example takes its capacity")
    live.simulator.close_lease(handle.rpartition("/")[2], "lease_closed_reason_reclaimed")
    status = ended(live, handle)
    assert (status.state, status.exit_code) == (State.PREEMPTED, 75)
    assert status.reason == "the provider cheap.example took its capacity back (lease_closed_reason_reclaimed)"
    assert [line.text for line in live.backend().logs(handle) if line.text in ("there", "saved")] == ["there", "saved"]


def test_a_container_that_is_started_again_does_not_train_again(live: Ground) -> None:
    handle = live.backend().submit(*live.plan(SLEEP))
    running(live, handle)
    lease = live.simulator.leases[handle.rpartition("/")[2]]
    lease.restart("node-0")
    status = ended(live, handle)
    assert status.state is State.LOST and "killed or restarted by its provider" in status.reason
    assert lease.starts == {"node-0": 2} and live.simulator.active() == []
    assert [line.text for line in live.backend().logs(handle) if line.rank >= 0].count("there") == 1


def test_a_lease_is_closed_at_its_deadline(paper: Ground) -> None:
    plan, bundle = paper.plan("print(1)")
    handle = paper.backend().submit(replace(plan, request={**plan.request, "deadline_s": 1}), bundle)
    status = ended(paper, handle)
    assert status.state is State.TIMED_OUT and paper.simulator.active() == []


def test_an_end_is_reported_when_the_lease_is_closed(live: Ground) -> None:
    """A lease that cannot be closed is still billed: the watcher asks again until it is."""
    live.simulator.faults.append(Fault("DELETE", "/v1/deployments/", 500, times=15))
    backend = live.backend()
    handle = backend.submit(*live.plan("print('done')"))
    waiting = wait_for(lambda: "billed" in (status := backend.status(handle)).reason and status, "its end")
    assert waiting.state is State.STOPPING and "ended SUCCEEDED, but its lease is still billed" in waiting.reason
    assert ended(live, handle).state is State.SUCCEEDED and live.simulator.active() == []
    assert live.simulator.leases[handle.rpartition("/")[2]].starts == {"node-0": 1}, (
        "a container that exits is started again"
    )


def test_looking_survives_errors_of_the_service(paper: Ground) -> None:
    handle = paper.backend().submit(*paper.plan("print(1)"))
    paper.simulator.faults += [Fault("GET", r"/v1/deployments/\d+", status) for status in (503, 500, 429, 0)]
    assert paper.backend().status(handle).state is State.STARTING
    assert paper.simulator.faults[-1].times == 0


def test_a_source_that_is_another_one(live: Ground) -> None:
    plan, bundle = live.plan("print(1)")
    _, other = live.plan("print('another source')", run_id="other")
    live.store.put(str(plan.request["source"]["uri"]).removeprefix("s3://bucket/"), other.path.read_bytes())
    status = ended(live, live.backend().submit(plan, bundle))
    assert (status.state, status.exit_code) == (State.FAILED, 78)
    assert status.reason == "node 0: the source cannot be fetched: its content is not what its name says"


# -- secrets -------------------------------------------------------------------------------------------------------------


def test_the_api_key_and_secrets_stay_here(live: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key goes into headers alone. Values of secrets go through the store, and are deleted there once they were taken."""
    monkeypatch.setenv("TOKEN_OF_MINE", "word-that-nobody-sees")
    plan, bundle = live.plan(SLEEP, secrets={"TOKEN": ["env:TOKEN_OF_MINE"]})
    handle = live.backend().submit(plan, bundle)
    running(live, handle)
    sent = b"".join(body for _, _, body in live.simulator.server.request_bodies)
    kept = live.store.objects()
    assert not [name for name in kept if name.endswith("/given")]
    for secret in (API_KEY, "word-that-nobody-sees", os.environ["AWS_SECRET_ACCESS_KEY"]):
        assert secret.encode() not in sent + plan.to_json().encode()
        assert not [name for name, data in kept.items() if secret.encode() in data]
        assert not [path for path in live.folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_another_servers_404_closes_nothing(paper: Ground) -> None:
    """A proxy, or an account without a wallet, answers 404 too: the deployment is not gone, and is billed."""
    handle = paper.backend().submit(*paper.plan("print(1)"))
    for method in ("GET", "DELETE"):
        paper.simulator.faults.append(Fault(method, r"/v1/deployments/\d+", 404, "UserWallet Not Found"))
    with pytest.raises(BackendError, match="cannot be read"):
        paper.backend().status(handle)
    with pytest.raises(
        BackendError, match="Akash has not confirmed that the job ended: the deployment cannot be closed"
    ):
        paper.backend().cancel(handle)
    assert paper.backend().status(handle).state is not State.LOST
    paper.backend().cancel(handle)
    assert paper.simulator.active() == []


def test_an_account_that_must_send_a_deposit(paper: Ground) -> None:
    paper.simulator.behavior.deposit_required = True
    with pytest.raises(BackendError, match="deposit is required"):
        paper.backend().submit(*paper.plan("print(1)", run_id="without"))
    assert paper.backend(deposit_usd=5.0).submit(*paper.plan("print(1)", run_id="with"))


def test_an_sdl_that_is_sent_by_hand_trains(live: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan --manifests`: the source is in it, the keys are filled in, and nobody but the run itself writes to the store."""
    plan, bundle = live.plan("print('by hand', flush=True)\n", num_nodes=2)
    text = live.backend().manifests(plan, bundle.path.read_bytes())
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        text = text.replace(f"{name}=REPLACE-ME", f"{name}={os.environ[name]}")
    console = Console(live.simulator.url, "env:AKASH_API_KEY")
    made = console.create(text)
    console.lease(made["manifest"], console.bids(made["dseq"])[0])
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", live.store.url)
    run = AttachedRun(f"s3://bucket/ct/{plan.run_id}")

    def ended() -> bool:
        return (
            any(name.endswith("run-x/run.json") for name in live.store.objects())
            and run.attempts()[0].status.state.final
        )

    wait_for(ended, "its end")
    assert run.attempts()[0].status.state is State.SUCCEEDED
    assert sorted(line.text for line in run.lines(plan.attempt_id) if line.rank >= 0) == ["by hand"] * 2
    console.close(made["dseq"])
