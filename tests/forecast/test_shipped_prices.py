"""The shipped price lists: each machine has a price or a reason, and figures agree with a second source that was opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cloudtrain.backends import machines
from cloudtrain.backends.machines import Machine
from cloudtrain.backends.vertex.prices import FACTOR
from cloudtrain.cli import main
from cloudtrain.forecast import prices
from cloudtrain.forecast.prices import Shipped

HOMES = {"sagemaker": "us-east-1", "vertex": "us-central1"}
REGIONS = [
    *HOMES.items(), ("vertex", "europe-west4"), ("vertex", "asia-southeast1"), ("vertex", "us-east4"),
    ("sagemaker", "eu-west-1"),
]  # fmt: skip
# On demand, by machine. GCP and EC2: "GPU Cloud Pricing and TCO" (2026-09-19) of Google's page and AWS's sheet; SageMaker:
# data/sagemaker-prices.json (training) of github.com/johbro/ocp-ai-cost-modeler@9a0e3fe (2026-04-21).
SECOND = {
    "gcp/us-central1": {
        "a2-highgpu-1g": 3.673385, "a2-highgpu-8g": 29.38708, "a2-megagpu-16g": 55.739504, "a2-ultragpu-1g": 5.06879789,
        "a2-ultragpu-8g": 40.550383, "a3-highgpu-8g": 88.49, "g4-standard-48": 4.49993, "g4-standard-384": 35.99944,
        "g2-standard-48": 4.001665,
    },
    "aws/us-east-1": {
        "p4d.24xlarge": 21.9576, "p4de.24xlarge": 27.44705, "p5.4xlarge": 6.88, "p5.48xlarge": 55.04,
        "p5en.48xlarge": 63.296, "p6-b200.48xlarge": 113.9328, "p6-b300.48xlarge": 142.416, "g7e.2xlarge": 3.36312,
        "g7e.48xlarge": 33.14432,
    },
    "sagemaker/us-east-1": {
        "ml.g5.2xlarge": 1.515, "ml.g5.4xlarge": 2.03, "ml.g5.8xlarge": 3.06, "ml.g5.12xlarge": 7.09, "ml.g5.48xlarge": 20.36,
        "ml.g6.xlarge": 1.127, "ml.g6.2xlarge": 1.222, "ml.g6.12xlarge": 5.752, "ml.g6.48xlarge": 16.688,
        "ml.g6e.xlarge": 2.61, "ml.g6e.12xlarge": 13.12, "ml.g6e.48xlarge": 37.66, "ml.p4d.24xlarge": 25.2512883,
        "ml.p4de.24xlarge": 31.5641075, "ml.p5.48xlarge": 63.296, "ml.trn1.2xlarge": 1.54, "ml.trn1.32xlarge": 24.73,
    },
}  # fmt: skip
Lists = Mapping[str, Mapping[str, Shipped]]


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Shipped]]:
    """Return a copy of the shipped lists, which prices are read from until the end of the test."""
    read, homes = prices.shipped()
    copy = {name: dict(rows) for name, rows in read.items()}
    monkeypatch.setattr(prices, "shipped", lambda: (copy, homes))
    return copy


def price(name: str, machine: Machine | str) -> float | None:
    """Return what a machine of a list costs by what cloudtrain comes with."""
    row = machine if isinstance(machine, Machine) else None
    named = machines.priced_name(row) if row else str(machine)
    found = prices.listed(f"{name}/{named}", row.price if row else None, 1, None)
    return found["usd_per_hour"] if found else None


def silent(platform: str, region: str) -> Iterator[str]:
    """Yield the machines of a table that have neither a price nor a reason."""
    for machine in machines.load(platform):
        name = f"{platform}/{region}"
        row = prices.built_in(name, machines.priced_name(machine))
        if price(name, machine) is None and not (row and row.note):
            yield machine.name


def wrong(name: str) -> list[str]:
    """Return the machines whose price differs by more than 1 % from the second source's."""
    tables = {machine.name: machine for table in HOMES for machine in machines.load(table)}
    return [
        machine
        for machine, usd in SECOND[name].items()
        if (own := price(name, tables[machine] if machine.startswith("ml.") else machine)) is None
        or abs(own / usd - 1) > 0.01
    ]


@pytest.mark.parametrize(("platform", "region"), REGIONS)
def test_each_machine_has_a_price_or_a_reason(platform: str, region: str, lists):
    assert list(silent(platform, region)) == []


def test_few_machines_have_no_price():
    none = {name for table, region in HOMES.items() for name in _without_price(table, region)}
    assert none == {"a4-highgpu-8g", "a4x-highgpu-4g", "ml.p5e.48xlarge", "ml.p6e-gb200.36xlarge", "ml.trn2.48xlarge"}
    assert {name.partition("-")[0] for name in _without_price("vertex", "europe-west4")} == {"a4", "a4x"}
    gone = {m.accelerator for m in machines.load("vertex") if price("vertex/asia-southeast1", m) is None}
    assert gone == {"V100-16GB", "P100", "B200", "GB200"}


def _without_price(table: str, region: str) -> list[str]:
    return [machine.name for machine in machines.load(table) if price(f"{table}/{region}", machine) is None]


def test_a_machine_that_is_left_out_is_noticed(lists):
    del lists["vertex/us-central1"]["g2-standard-4"], lists["sagemaker/us-east-1"]["ml.trn2.48xlarge"]
    assert list(silent("vertex", "us-central1")) == ["g2-standard-4"]
    assert list(silent("sagemaker", "us-east-1")) == ["ml.trn2.48xlarge"]


@pytest.mark.parametrize("name", SECOND)
def test_prices_agree_with_a_second_source(name: str):
    assert wrong(name) == []


@pytest.mark.parametrize(("name", "machine"), [("gcp/us-central1", "a2-highgpu-8g"), ("aws/us-east-1", "p5.48xlarge")])
def test_a_wrong_figure_is_noticed(name: str, machine: str, lists):
    row = lists[name][machine]
    lists[name][machine] = row._replace(usd_per_hour=(row.usd_per_hour or 0) * 1.02)
    assert wrong(name) == [machine]


@pytest.mark.parametrize("region", ["us-central1", "europe-west4", "asia-southeast1"])
def test_vertex_is_compute_engine_and_the_fee(region: str, lists):
    compared = 0
    for machine, row in lists[f"vertex/{region}"].items():
        base = lists[f"gcp/{region}"][machine]
        if machine == "*" or row.usd_per_hour is None or base.usd_per_hour is None:
            continue
        share = row.usd_per_hour / base.usd_per_hour
        ssd = machine.startswith(("a2-ultra", "a3-"))  # which the training does not bill
        assert FACTOR * 0.96 < share < FACTOR if ssd else share == pytest.approx(FACTOR, rel=1e-4), machine
        if row.spot and base.spot:
            fee = (FACTOR - 1) / FACTOR * row.usd_per_hour
            assert row.spot == pytest.approx([usd + fee for usd in base.spot], rel=1e-3), machine
            assert row.spot[0] <= row.spot[1] < row.usd_per_hour, machine
        assert row.note == f"{FACTOR} x Compute Engine"
        compared += 1
    assert compared > 50


def test_the_billed_price_agrees_with_the_derived_one(lists):
    billed = machines.find_machine(machines.load("vertex"), "a3-highgpu-8g")
    assert billed and billed.usd_per_hour
    assert lists["vertex/us-central1"]["a3-highgpu-8g"].usd_per_hour == pytest.approx(billed.usd_per_hour, rel=1e-3)
    assert lists["vertex/us-central1"]["n1-standard-4"].usd_per_hour == pytest.approx(0.21849885, rel=1e-3)


def test_other_regions_have_the_factor_of_the_list(lists):
    found = prices.built_in("vertex/us-east4", "g2-standard-4")
    factor, home = lists["vertex/us-east4"]["*"].usd_per_hour, lists["vertex/us-central1"]["g2-standard-4"].usd_per_hour
    assert found and factor and home and found.usd_per_hour == pytest.approx(factor * home) and found.spot is None
    assert found.note == f"{FACTOR} x Compute Engine; {factor:g} x the price of us-central1"


def test_the_machines_of_a_list_that_is_not_stored_can_be_listed(home: Path, capsys):
    for region, usd in (("us-central1", "0.707"), ("us-east4", "0.796")):
        assert main(["prices", "list", f"gcp/{region}", "--gpus", "L4"]) == 0
        head, first, *_ = capsys.readouterr().out.splitlines()
        assert first.startswith("g2-standard-4 ") and f" {usd} " in first
        assert ("spot" in head) == (region == "us-central1")
    assert main(["prices", "list", "gcp/mars-1"]) == 2


def test_each_source_has_a_date_a_licence_and_an_address(lists):
    for name, rows in lists.items():
        for machine, row in rows.items():
            if row.usd_per_hour is not None:
                assert prices.age_days(row.as_of) >= 0 and "https://" in row.url and " " not in row.source, (
                    name,
                    machine,
                )
