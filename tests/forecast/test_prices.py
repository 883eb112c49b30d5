"""Which price a plan has: the stated one, the stored list's, the shipped table's; and how it is shown."""

from __future__ import annotations

import json
import socket
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path

import pytest

from cloudtrain.backends import machines
from cloudtrain.cli import main
from cloudtrain.forecast import prices
from cloudtrain.testing.clock import VirtualClock
from tests.forecast.test_refresh import store

SHIPPED = machines.find_machine(machines.load("sagemaker"), "ml.g5.2xlarge")
TODAY = date(2027, 1, 20)
OPTIONS = '{{role: "arn:aws:iam::123456789012:role/r", bucket: my-bucket, region: {region}}}'


@pytest.fixture(autouse=True)
def today(monkeypatch):
    """Each test reads its prices on the same day."""
    noon = datetime.combine(TODAY, time(12), UTC)
    monkeypatch.setattr(prices, "SYSTEM", VirtualClock(noon.timestamp()))


@pytest.fixture
def plan(tmp_path: Path, monkeypatch, capsys):
    """Return a function that plans a job, without any socket, and returns what is shown and the plan's price."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("plan opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)

    def run(text: str, *words: str) -> tuple[str, dict | None]:
        (tmp_path / "job.yaml").write_text(f"entrypoint: train.py\n{text}\n")
        capsys.readouterr()
        assert main(["plan", *words, "--json"]) == 0, capsys.readouterr().err
        price = json.loads(capsys.readouterr().out)["price"]
        assert main(["plan", *words]) == 0
        line = next((line for line in capsys.readouterr().out.splitlines() if line.startswith("  price")), "")
        return line.removeprefix("  price").strip(), price

    return run


def on_sagemaker(region: str, **resources: object) -> str:
    wanted = json.dumps({"instance_type": "ml.g5.2xlarge", **resources})
    return (
        f"target: sagemaker\nnum_nodes: 2\nresources: {wanted}\noptions: {{sagemaker: {OPTIONS.format(region=region)}}}"
    )


def test_the_shipped_table_is_the_floor(plan):
    assert SHIPPED is not None and SHIPPED.usd_per_hour is not None
    line, price = plan(on_sagemaker("us-east-1"))
    assert price["usd_per_hour"] == 2 * SHIPPED.usd_per_hour and not price.get("estimate")
    assert line.startswith(f"{price['usd_per_hour']} USD an hour (2 x ml.g5.2xlarge, us-east-1; aws; ")
    assert f"{prices.age_days(SHIPPED.price_date)} days old" in line


def test_the_price_of_another_region_is_called_an_estimate(plan):
    line, price = plan(on_sagemaker("eu-west-1"))
    assert price["estimate"] == "the price of us-east-1"
    assert line.startswith("about ") and "an estimate: the price of us-east-1" in line


def test_a_stored_list_wins_and_shows_its_age(plan, home: Path):
    store(home, "sagemaker/eu-west-1", {"ml.g5.2xlarge": 1.69}, f"{TODAY - timedelta(5)}")
    line, price = plan(on_sagemaker("eu-west-1"))
    assert price["usd_per_hour"] == 3.38 and not price.get("estimate")
    assert (
        line
        == f"3.38 USD an hour (2 x ml.g5.2xlarge, eu-west-1; AWS's price list 7; {TODAY - timedelta(5)}, 5 days old)"
    )
    store(home, "sagemaker/eu-west-1", {"ml.g5.2xlarge": 1.7}, f"{TODAY - timedelta(31)}")
    line, price = plan(on_sagemaker("eu-west-1"))
    assert price["usd_per_hour"] == 3.4 and "31 days old: run cloudtrain prices refresh for a newer list" in line


def test_spot_counts_at_the_on_demand_price(plan, home: Path):
    store(home, "sagemaker/eu-west-1", {"ml.g5.2xlarge": 1.69}, f"{TODAY}")
    assert plan(on_sagemaker("eu-west-1", use_spot=True))[1] == plan(on_sagemaker("eu-west-1"))[1]
    place = "target: vertex\nimage: img:1\noptions: {vertex: {project: my-project, bucket: my-bucket}}"
    spot = plan(f"{place}\nresources: {{accelerators: H100:8, use_spot: true}}")[1]
    assert spot and spot == plan(f"{place}\nresources: {{accelerators: H100:8}}")[1]


def test_a_newer_shipped_table_wins_over_an_old_list(plan, home: Path):
    store(home, "sagemaker/us-east-1", {"ml.g5.2xlarge": 99.0}, "2020-01-01")
    assert plan(on_sagemaker("us-east-1"))[1]["usd_per_hour"] == 2 * SHIPPED.usd_per_hour


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"name": "x"}',
        '{"name": "x", "usd_per_hour": 7, "source": "", "as_of": "2026-11-18"}',
        '{"name": "x", "usd_per_hour": {"ml.g5.2xlarge": 1}, "source": "", "as_of": "yesterday"}',
        '{"name": "x", "usd_per_hour": {"ml.g5.2xlarge": 0}, "source": "", "as_of": "2027-11-18"}',
        '{"name": "x", "usd_per_hour": {"ml.g5.2xlarge": "free"}, "source": "", "as_of": "2027-11-18"}',
        '{"name": "x", "usd_per_hour": {"ml.g5.2xlarge": 1}, "source": "", "as_of": "2027-11-18", "more": 1}',
    ],
)
def test_a_damaged_list_counts_as_none(text: str, plan, home: Path):
    store(home, "sagemaker/us-east-1", {})
    prices.file_of(home, "sagemaker/us-east-1").write_text(text)
    assert plan(on_sagemaker("us-east-1"))[1]["usd_per_hour"] == 2 * SHIPPED.usd_per_hour
    assert main(["prices"]) == 0


def test_what_is_not_known_is_not_zero(plan, home: Path, capsys):
    store(home, "sagemaker/us-east-1", {"ml.g5.2xlarge": 1.5}, f"{TODAY}")
    job = on_sagemaker("us-east-1", instance_type="ml.p9.48xlarge", accelerators="H100:8")
    said = "no price for ml.p9.48xlarge in us-east-1: no list that cloudtrain comes with has it"
    assert plan(job) == (said, None)
    assert main(["plan", "--set", "limits.max_cost=5 USD"]) == 2
    refused = capsys.readouterr().err
    assert "cloudtrain prices refresh" in refused and said in refused


def test_a_machine_of_ones_own_has_the_price_of_a_public_list(plan, home: Path, tmp_path: Path):
    (tmp_path / "cloudtrain.toml").write_text(
        '[targets.lab]\nbackend = "slurm"\nfolder = "/shared"\npriced_as = "aws/us-east-1/g5.12xlarge"\n'
    )
    line, price = plan("num_nodes: 2", "-t", "lab")
    assert price["usd_per_hour"] == 11.344 and "; karpenter; 2026-07-20" in line
    store(home, "aws/us-east-1", {"g5.12xlarge": 5.7}, f"{TODAY}", "SkyPilot's catalogue")
    line, price = plan("num_nodes: 2", "-t", "lab")
    assert price["usd_per_hour"] == 11.4
    assert line == f"11.4 USD an hour (2 x g5.12xlarge, us-east-1; SkyPilot's catalogue; {TODAY}, of today)"
    stated = plan("num_nodes: 2\nresources: {usd_per_hour: 2}", "-t", "lab")[1]
    assert stated["usd_per_hour"] == 4, "a stated price wins"


VERTEX = (
    "target: vertex\nimage: img:1\noptions: {vertex: {project: my-project, bucket: my-bucket, region: asia-southeast1}}"
)


def test_a_machine_that_is_not_sold_on_demand_has_a_reason(plan, capsys):
    line, price = plan(f"{VERTEX}\nresources: {{accelerators: B200:8, use_spot: true}}")
    why = "sold as spot, flex-start or reservation only: Google publishes no price on demand"
    assert (line, price) == (f"no price for a4-highgpu-8g in asia-southeast1: {why}", None)
    assert main(["plan", "--set", "limits.max_cost=50 USD"]) == 2 and why in capsys.readouterr().err


def test_a_spot_price_is_beside_the_one_on_demand(plan, home: Path, capsys):
    line, price = plan(f"{VERTEX}\nnum_nodes: 2\nresources: {{accelerators: L4:1, use_spot: true}}")
    row = prices.built_in("vertex/asia-southeast1", "g2-standard-4")
    assert row and row.spot and price["usd_per_hour"] == round(2 * row.usd_per_hour, 6)
    low, high = price["spot"]
    assert (low, high) == tuple(round(2 * usd, 6) for usd in row.spot) and high < price["usd_per_hour"]
    assert line.startswith(
        f"about {price['usd_per_hour']} USD an hour on demand (2 x g2-standard-4, asia-southeast1; an estimate: "
    )
    assert "; gcosts; 2026-07-30, " in line and line.endswith(f", on spot {low:g} to {high:g} (30 days to 2026-07-30)")
    assert "https://" not in line
    assert main(["plan", "--verbose"]) == 0
    assert "price from Apache-2.0, https://github.com/Cyclenerd/" in capsys.readouterr().out


def test_a_cap_holds_with_a_shipped_price(plan, capsys):
    job = f"{VERTEX}\nresources: {{accelerators: A100-40GB:1}}\nlimits: {{max_cost: 6 USD, max_runtime: 6h}}"
    plan(job)
    assert main(["plan", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    rate = made["price"]["usd_per_hour"]
    assert 4 < rate < 5 and made["at_most"]["usd"] == 6.0
    assert made["at_most"]["attempt_s"] / 3600 * rate <= 6.0


def test_a_node_has_the_price_of_the_type_that_the_job_names(plan, tmp_path: Path):
    (tmp_path / "cloudtrain.toml").write_text('[targets.k]\nbackend = "kubernetes"\nimage = "img:1"\n')
    line, price = plan("num_nodes: 2\nresources: {instance_type: g5.xlarge}", "-t", "k")
    assert price["usd_per_hour"] == 2.012 and "2 x g5.xlarge, us-east-1; an estimate: a node's price" in line
    _, price = plan("resources: {instance_type: n1-standard-8, accelerators: T4:1}", "-t", "k")
    row = prices.built_in("gcp/us-central1", "n1-standard-8+NVIDIA_TESLA_T4:1")
    assert row and price["usd_per_hour"] == row.usd_per_hour, "with its GPU"
    assert plan("resources: {instance_type: n1-standard-8, accelerators: T4:8}", "-t", "k")[1] is None
    assert plan("resources: {accelerators: T4:1}", "-t", "k") == ("", None)
    stated = plan("resources: {instance_type: g5.xlarge, usd_per_hour: 0.5}", "-t", "k")[1]
    assert stated["usd_per_hour"] == 0.5 and "known_usd_per_hour" not in stated, "a discount of your own"


def test_machines_of_several_types_have_their_own_sum(plan):
    groups = "[{name: a, instance_type: ml.g5.2xlarge, count: 1}, {name: b, instance_type: ml.g5.4xlarge, count: 1}]"
    options = OPTIONS.format(region="us-east-1").replace("}", f", instance_groups: {groups}}}")
    _, price = plan(f"target: sagemaker\nnum_nodes: 2\noptions: {{sagemaker: {options}}}")
    assert price and price["usd_per_hour"] == 3.545


def test_a_name_of_no_list_is_refused(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    assert main(["plan", "train.py", "--set", "resources.priced_as=g5.12xlarge"]) == 2
    assert "aws/us-east-1/g5.12xlarge" in capsys.readouterr().err
    assert main(["prices", "refresh", "azure/west"]) == 2 and main(["prices", "refresh"]) == 2
    assert main(["prices", "refresh", "aws/../../etc"]) == 2


def test_refresh_reads_the_lists_that_targets_need(tmp_path: Path, monkeypatch):
    from cloudtrain.cli import prices as command

    monkeypatch.chdir(tmp_path)
    (tmp_path / "cloudtrain.toml").write_text(
        '[targets.prod]\nbackend = "sagemaker"\nregion = "eu-west-1"\n'
        '[targets.tpu]\nbackend = "vertex"\n'
        '[targets.lab]\nbackend = "ssh"\npriced_as = "runpod/US/1x_H100"\n[targets.desk]\nbackend = "local"\n'
    )
    wanted = command._wanted(tmp_path / "home", ())
    assert wanted == ["runpod/US", "sagemaker/eu-west-1", "vertex/us-central1"]


def test_list_shows_machines_with_their_prices_the_cheapest_first(home: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cloudtrain.toml").write_text('[targets.prod]\nbackend = "sagemaker"\nregion = "eu-west-1"\n')
    store(home, "sagemaker/eu-west-1", {"ml.g5.12xlarge": 9.9, "ml.new.large": 2.5, "ml.m5.large": 0.1}, f"{TODAY}")

    def shown(*words: str) -> list[dict]:
        assert main(["prices", "list", *words, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    rows = shown("-t", "prod")
    known = [row["usd_per_hour"] for row in rows if row["usd_per_hour"] is not None]
    assert known == sorted(known) and rows[0]["machine"] == "ml.m5.large"
    (big,) = [row for row in rows if row["machine"] == "ml.g5.12xlarge"]
    assert (big["gpu"], big["gpus"], big["gpu_memory_gb"], big["vcpus"], big["memory_gb"]) == ("A10G", 4, 24, 48, 192)
    assert (big["list"], big["usd_per_hour"], big["estimate"]) == ("sagemaker/eu-west-1", 9.9, "")
    assert any(row["machine"] == "ml.new.large" and row["gpus"] is None for row in rows), "only the list has it"
    assert {row["estimate"] for row in rows if row["machine"] == "ml.g5.2xlarge"} == {"the price of us-east-1"}
    assert rows == shown("sagemaker/eu-west-1") == shown(), "the lists of the targets, without a name"
    assert {(row["gpu"], row["gpus"]) for row in shown("--gpus", "A100:8")} == {("A100-40GB", 8), ("A100-80GB", 8)}
    assert {row["machine"] for row in shown("--max-usd-per-hour", "0.1")} == {"ml.m5.large"}
    assert shown("--sort", "gpu-memory")[0]["gpu"] == "B300"
    assert main(["prices", "list", "--gpus", "A10G", "-t", "prod"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["machine", "GPUs"] and "ml.g5.12xlarge" in "".join(lines)
    for words, wrong in (
        (["list", "-t", "local"], "has no price list"),
        (["list", "aws/mars-1"], "cloudtrain prices refresh aws/mars-1"),
        (["list", "--gpus", "K8"], "no machine"),
        (["refresh", "--gpus", "T4"], "--gpus"),
    ):
        assert main(["prices", *words]) == 2 and wrong in capsys.readouterr().err, words


def test_machines_rented_by_hand_have_the_facts_of_the_platforms_types(home: Path, capsys):
    store(home, "aws/us-east-1", {"g5.12xlarge": 5.67})
    store(home, "gcp/us-central1", {"n1-standard-8+NVIDIA_TESLA_T4:1": 0.73})
    assert main(["prices", "list", "aws/us-east-1", "gcp/us-central1", "--json"]) == 0
    rows = {row["machine"]: row for row in json.loads(capsys.readouterr().out)}
    first, second = rows["n1-standard-8+NVIDIA_TESLA_T4:1"], rows["g5.12xlarge"]
    assert (first["gpu"], first["gpus"], second["gpu"], second["gpus"]) == ("T4", 1, "A10G", 4)


def test_prices_lists_what_is_stored(home: Path, capsys):
    store(home, "sagemaker/eu-west-1", {"ml.g5.2xlarge": 1.69, "ml.m5.large": 0.1}, f"{TODAY - timedelta(5)}")
    assert main(["prices"]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:4] == ["sagemaker/eu-west-1", "2", f"{TODAY - timedelta(5)}", "5"]
    assert main(["prices", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["usd_per_hour"]["ml.m5.large"] == 0.1 and entry["age_days"] == 5
