"""The request on Akash: what a plan says, golden SDLs that the public schema takes, and what is refused."""

from __future__ import annotations

import base64
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.backends.akash import container, groups
from cloudtrain.backends.akash.backend import AkashBackend
from cloudtrain.backends.akash.bids import rate
from cloudtrain.backends.akash.sdl import gpu_model, price_amount, usd_per_hour
from cloudtrain.backends.api import Plan
from cloudtrain.errors import BadJob, BadRequest
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle
from tests.backends.akash.schema import check_sdl

GOLDEN = Path(__file__).parents[2] / "golden" / "akash"
OPTIONS: dict[str, Any] = {"store": "s3://bucket/ct", "image": "registry.example/train:1", "max_usd_per_hour": 2.5}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cpu_one_node": ({}, {}),
    "a100_two_nodes": (
        {"num_nodes": 2, "resources": {"accelerators": "A100-80GB:8", "cpus": 96, "memory": "512GiB", "disk_gb": 500}},
        {"gpu_interface": "sxm", "shm": "64Gi"},
    ),
    "everything": (
        {"num_nodes": 3, "resources": {"accelerators": "RTX4090:2", "usd_per_hour": 0.9}, "labels": {"team": "nlp"}},
        {
            "attributes": {"region": "eu-west"},
            "auditors": ["akash1365yvmc4s7awdyj3n2sav7xfx76adc6dnmlx63"],
            "reclamation_window": "24h",
            "persistent": {"size": "200Gi", "mount": "/data", "storage_class": "beta3"},
            "store_endpoint": "https://store.example",
            "store_region": "auto",
        },
    ),
    "roles": (
        {
            "resources": {"accelerators": "H100:8", "cpus": 64},
            "roles": {
                "trainer": {"num_nodes": 2},
                "server": {"run": "serve", "resources": {"accelerators": "RTX4090:2", "disk_gb": 90}},
                "proxy": {"run": "proxy", "resources": {"cpus": 2, "memory": "4GiB"}},
            },
        },
        {},
    ),
}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text("print(1)\n")
    return Bundle.make(tmp_path / "source", tmp_path / "bundles")


def planned(bundle: Bundle, job: dict[str, Any], options: dict[str, Any]) -> Plan:
    data = {"name": "train", "entrypoint": "train.py", "environment": {"requirements": "none"}, **job}
    return AkashBackend({**OPTIONS, **options}, Path("runs")).plan(Job.from_dict(data), bundle, "train-x", 1)


def stable(plan: Plan) -> dict[str, Any]:
    """Return the request without what depends on the version of the code: digests, the manifest, the container's command."""
    request = json.loads(json.dumps(plan.request))
    request["source"] = "SOURCE"
    for service in request["sdl"]["services"].values():
        names = ("CLOUDTRAIN_MANIFEST_", "CLOUDTRAIN_SOURCE_SHA256")
        service["command"][2] = "COMMAND"
        service["env"] = [item for item in service["env"] if not item.startswith(names)]
    return dict(request)


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, bundle: Bundle) -> None:
    plan = planned(bundle, *CASES[name])
    check_sdl(plan.request["sdl"])
    path = GOLDEN / f"{name}.json"
    text = json.dumps(stable(plan), indent=2, sort_keys=True) + "\n"
    if os.environ.get("CLOUDTRAIN_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


def test_the_schema_refuses_what_is_wrong(bundle: Bundle) -> None:
    """The check above can fail."""
    sdl = json.loads(json.dumps(planned(bundle, *CASES["a100_two_nodes"]).request["sdl"]))
    del sdl["profiles"]["compute"]["node"]["resources"]["gpu"]["attributes"]
    with pytest.raises(ValueError, match="attributes"):
        check_sdl(sdl)


def test_the_ceiling_is_the_plans_price_and_caps_the_run(bundle: Bundle) -> None:
    plan = planned(bundle, {"num_nodes": 2}, {})
    assert plan.price == {"usd_per_hour": 5.0, "as_of": "", "source": "the ceiling of bids"}
    pricing = plan.request["sdl"]["profiles"]["placement"]["akash"]["pricing"]["node"]
    assert pricing["denom"] == "uact" and usd_per_hour(pricing["amount"]) <= 2.5
    assert usd_per_hour(price_amount(2.5) + 1) > 2.5
    assert planned(bundle, {"resources": {"usd_per_hour": 0.5}}, {}).request["ceiling_usd_per_hour"] == 0.5


def test_each_role_has_a_profile_of_its_own_and_bids_need_the_gpus_of_all(bundle: Bundle) -> None:
    plan = planned(bundle, *CASES["roles"])
    sdl = plan.request["sdl"]
    assert [each["akash"]["profile"] for each in sdl["deployment"].values()] == [
        "trainer", "trainer", "server", "proxy",
    ]  # fmt: skip
    assert sdl["profiles"]["placement"]["akash"]["pricing"].keys() == {"trainer", "server", "proxy"}
    assert plan.request["gpus"] == [{"model": "h100"}, {"model": "rtx4090"}]
    assert AkashBackend(OPTIONS, Path("runs")).facts(plan).gpus == 2 * 8 + 2
    bid = {"id": {"provider": "p"}, "price": {"denom": "uact", "amount": "1"}, "state": "open"}
    offers = [{"resources": {"gpu": {"attributes": [{"key": "vendor/nvidia/model/h100"}]}}}]
    asked = {"ceiling_usd": 1.0, "gpus": plan.request["gpus"], "options": {}}
    (made,) = rate([{**bid, "resources_offer": offers}], {}, **asked)
    assert made.why_not == "offers no rtx4090"


def test_a_cost_cap_shortens_the_attempt_at_the_ceiling(bundle: Bundle) -> None:
    from cloudtrain.runs.planning.cap import plan_attempt

    backend = AkashBackend(OPTIONS, Path("runs"))
    data = {"name": "train", "entrypoint": "train.py", "environment": {"requirements": "none"}}
    job = Job.from_dict({**data, "limits": {"max_cost": "5 USD"}, "retry": {"max_attempts": 1}})
    plan = plan_attempt(backend, job, bundle, "train-x")
    assert plan.manifest["max_runtime_s"] + plan.manifest["grace_s"] <= 2 * 3600, "5 USD at 2.5 an hour"
    assert plan.at_most is not None and plan.at_most["usd"] <= 5


@pytest.mark.parametrize(
    ("accelerator", "model"),
    [
        ("A100-80GB", {"model": "a100", "ram": "80Gi"}),
        ("H100", {"model": "h100"}),
        ("RTX4090", {"model": "rtx4090"}),
        ("L40S", {"model": "l40s"}),
        ("V100-16GB", {"model": "v100", "ram": "16Gi"}),
    ],
)
def test_accelerators_are_models_of_akash(accelerator: str, model: dict[str, str]) -> None:
    assert gpu_model(accelerator) == model


@pytest.mark.parametrize(
    "image",
    ["registry/Train:1", "https://registry.example/train", "train:1 ", "train@sha256:12", "train:", "a//b", "x" * 501],
)
def test_a_name_of_no_image_is_refused_before_a_lease_is_paid_for(bundle: Bundle, image: str) -> None:
    with pytest.raises(BadJob) as raised:
        planned(bundle, {"image": image}, {})
    assert [problem.path for problem in raised.value.problems] == ["image"]


@pytest.mark.parametrize(
    "image", ["train", "registry.example:5000/team/train_x:1.0-gpu", f"ghcr.io/a/b@sha256:{'0' * 64}"]
)
def test_names_of_images_are_taken(bundle: Bundle, image: str) -> None:
    assert planned(bundle, {"image": image}, {}).request["sdl"]["services"]["node-0"]["image"] == image


def test_an_auditor_is_an_address_of_akash() -> None:
    given = {"store": "s3://bucket/x", "auditors": [CASES["everything"][1]["auditors"][0]]}
    assert AkashBackend.options()(**given)
    for auditor in ("akash1abc", "cosmos1365yvmc4s7awdyj3n2sav7xfx76adc6dnmlx63", "akash1" + "b" * 38):
        with pytest.raises(ValueError, match="auditors"):
            AkashBackend.options()(**given | {"auditors": [auditor]})


def test_all_problems_at_once(bundle: Bundle) -> None:
    with pytest.raises(BadJob) as raised:
        planned(
            bundle,
            {"output": "gs://bucket/x", "resources": {"use_spot": True}},
            {"store": "", "image": None, "max_usd_per_hour": None, "bid_wait": "soon"},
        )
    paths = {problem.path for problem in raised.value.problems}
    assert paths == {
        "output", "image", "resources.use_spot", "options.akash.store", "options.akash.max_usd_per_hour",
        "options.akash.bid_wait",
    }  # fmt: skip


def test_a_plan_by_hand_holds_source_and_no_secret(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-value")
    plan = planned(bundle, {"num_nodes": 2}, {})
    backend = AkashBackend(OPTIONS, Path("runs"))
    text = backend.manifests(plan, bundle.path.read_bytes())
    sdl = yaml.safe_load(text)
    check_sdl(sdl)
    assert "very-secret-value" not in text and "very-secret-value" not in plan.to_json()
    assert "AWS_SECRET_ACCESS_KEY=REPLACE-ME" in sdl["services"]["node-1"]["env"]
    env = dict(item.split("=", 1) for item in sdl["services"]["node-1"]["env"])
    pieces = [env[f"{container.INLINE}{number}"] for number in range(len(env)) if f"{container.INLINE}{number}" in env]
    packed, given = base64.b64decode("".join(pieces)), bundle.path.read_bytes()
    assert gzip.decompress(packed) == gzip.decompress(given) and len(packed) < len(given)
    assert not any("${" in item for item in sdl["services"]["node-0"]["env"])
    with pytest.raises(BadRequest, match="too many for the SDL of 9 nodes"):
        backend.manifests(planned(bundle, {"num_nodes": 9}, {}), bundle.path.read_bytes())


def test_the_hash_changes_with_the_attempt(bundle: Bundle) -> None:
    sdls = [planned(bundle, {"args": [word]}, {}).request["sdl"] for word in ("<a & b>", "other")]
    assert len({groups.manifest_hash(groups.manifest_json(sdl)) for sdl in sdls}) == 2


def test_the_hash_is_the_one_of_akashs_library() -> None:
    """Of npm @akashnetwork/chain-sdk 1.0.0-alpha.25 (2026-11-26), which escapes <, > and & alone; test_validator.py asks it."""
    sdl = yaml.safe_load((Path(__file__).parent / "letters.yaml").read_text())
    assert groups.manifest_hash(groups.manifest_json(sdl)) == "pQACotVcBCbbbt2S0vbN476JDc9AAwZba7CPZUdBj20="
