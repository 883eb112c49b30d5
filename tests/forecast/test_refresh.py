"""Price lists over HTTP, from servers that answer well and from those that do not; the provider's addresses are loopback."""

from __future__ import annotations

import csv
import io
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cloudtrain.backends import machines, price_lists
from cloudtrain.backends.sagemaker import prices as sagemaker
from cloudtrain.backends.vertex import prices as vertex
from cloudtrain.cli import main
from cloudtrain.errors import BackendError
from cloudtrain.forecast import download, prices, refresh
from tests.backends.test_http import send, serving

Reply = Callable[[BaseHTTPRequestHandler], None]
LIST = "sagemaker/eu-west-1"
KEY = "AIza-very-secret"
COLUMNS = (
    "SKU", "TermType", "Unit", "PricePerUnit", "Currency", "Product Family", "Region Code", "Component", "Instance Name",
)  # fmt: skip


def offers(*rows: tuple[str, ...]) -> bytes:
    """Return an offer file of AWS: each row is a component, machine and price, and what differs from the rest of its columns."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerows(
        [("FormatVersion", "v1.0"), ("Disclaimer", "one, two"), ("Publication Date", "2026-11-20T00:03:13Z")]
    )
    writer.writerows([("Version", "20261120000313"), ("OfferCode", "AmazonSageMaker"), COLUMNS])
    for number, (component, machine, price, *other) in enumerate(rows):
        region, unit, term = (*other, *("eu-west-1", "Hrs", "OnDemand")[len(other) :])
        writer.writerow((f"S{number}", term, unit, price, "USD", "ML Instance", region, component, machine))
    return out.getvalue().encode()


GOOD = offers(
    ("Training", "ml.g5.2xlarge", "1.6900000000"),
    ("Hosting", "ml.g5.2xlarge", "1.7000000000"),
    ("Training", "ml.p6-b200.48xlarge", "130.5"),
    ("Training", "ml.m5.large", "0.128", "us-east-1"),
    ("Training", "ml.m5.large", "0.128", "eu-west-1", "GB-Mo"),
    ("Training", "ml.g6.xlarge", "0.5", "eu-west-1", "Hrs", "Reserved"),
    ("Training", "ml.g4dn.xlarge", "0.0000000000"),
    ("Training", "ml.c5.large", "0.11"),
    ("Training", "ml.c5.large", "0.12"),
)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Reply], list[dict[str, str]]]]:
    """Return a function that puts a server in the place of every provider, and returns the headers that it gets."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def replace(reply: Reply) -> list[dict[str, str]]:
            url, received = stack.enter_context(serving(reply))
            for module, name in ((sagemaker, "AWS"), (vertex, "GOOGLE"), (price_lists, "SKYPILOT")):
                monkeypatch.setattr(module, name, url)
            return received

        yield replace


def test_only_certain_on_demand_prices_of_training_in_the_region_are_kept(provider, home: Path):
    paths = []
    provider(lambda handler: (paths.append(handler.path), send(handler, 200, GOOD)))
    found = refresh.refresh(home, LIST)
    assert paths == ["/offers/v1.0/aws/AmazonSageMaker/current/eu-west-1/index.csv"]
    assert found.usd_per_hour == {"ml.g5.2xlarge": 1.69, "ml.p6-b200.48xlarge": 130.5}
    assert found.source == "AWS's price list 20261120000313" and found.estimate == ""
    assert prices.load(home, LIST) == found, "what was stored is what was read"


def test_a_list_is_read_row_by_row(provider, home: Path):
    others = [("Hosting", f"ml.x{number}.large", "1.0") for number in range(20_000)]
    body = offers(*others, ("Training", "ml.g5.xlarge", "1.5"))
    provider(lambda handler: send(handler, 200, body))
    tracemalloc.start()
    try:
        found = refresh.refresh(home, LIST)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.usd_per_hour == {"ml.g5.xlarge": 1.5}
    assert peak < len(body) / 4, f"{peak} bytes for a list of {len(body)}"


def redirect(handler: BaseHTTPRequestHandler) -> None:
    if handler.path.startswith("/elsewhere"):
        send(handler, 200, GOOD)
    else:
        send(handler, 302, Location="/elsewhere")


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(GOOD)
    row = offers(("Hosting", "ml.m5.large", "1")).splitlines(True)[-1] * 1000
    while True:
        handler.wfile.write(row)


def dripping(handler: BaseHTTPRequestHandler) -> None:
    """Send a byte now and then: never silent for long, and never done."""
    handler.send_response(200)
    handler.end_headers()
    pause = threading.Event()
    for _ in range(600):  # until long after the reader has given up
        handler.wfile.write(b'"')
        handler.wfile.flush()
        pause.wait(0.05)


def silent(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(GOOD[:100])
    handler.wfile.flush()
    handler.rfile.read(1)  # until the reader has gone


HOSTILE: dict[str, tuple[Reply, str]] = {
    "status 500": (lambda handler: send(handler, 500, GOOD), "status 500"),
    "a redirect": (redirect, "does not follow"),
    "a page of a proxy": (lambda handler: send(handler, 200, b"<html>\n" * 50), "does not begin"),
    "nothing": (lambda handler: send(handler, 200), "0 machine types"),
    "bytes": (lambda handler: send(handler, 200, GOOD + b"\xff\xfe\n"), "not a price list"),
    "cut off": (lambda handler: send(handler, 200, GOOD[:-60], len(GOOD)), "connection was lost"),
    "a row cut in two": (lambda handler: send(handler, 200, GOOD.rpartition(b",")[0]), "fields instead of"),
    "not a number": (lambda handler: send(handler, 200, offers(("Training", "ml.m5.large", "one"))), "not a number"),
    "other columns": (lambda handler: send(handler, 200, GOOD.replace(b"PricePerUnit", b"Price")), "no column"),
    "half of the machines": (
        lambda handler: send(handler, 200, offers(("Training", "ml.m5.large", "1"))),
        "stored one 3",
    ),
    "one endless line": (lambda handler: send(handler, 200, b"x" * (1 << 20)), "a line of more"),
    "an endless list": (endless, "longer than"),
    "a byte now and then": (dripping, "not downloaded within"),
    "silence": (silent, "timed out"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_an_answer_that_is_no_list_leaves_the_stored_one(case: str, provider, home: Path, monkeypatch, capsys):
    monkeypatch.setattr(download, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(download, "SILENCE_S", 0.5 if case == "silence" else 60.0)
    monkeypatch.setattr(download, "LONGEST_S", 1.0 if case == "a byte now and then" else 60.0)
    before = store(home, LIST, {"ml.g5.2xlarge": 1.5, "ml.m5.large": 0.1, "ml.g6.xlarge": 0.9})
    reply, why = HOSTILE[case]
    provider(reply)
    assert main(["prices", "refresh", LIST]) == 5
    err = capsys.readouterr().err
    assert why in err and "stored lists stay as they were" in err
    assert prices.file_of(home, LIST).read_bytes() == before
    assert [path.name for path in (home / "prices").iterdir()] == [prices.file_of(home, LIST).name], "no leftovers"


def test_nobody_there_leaves_the_stored_list(home: Path, monkeypatch, capsys):
    monkeypatch.setattr(sagemaker, "AWS", "http://127.0.0.1:1")
    before = store(home, LIST, {"ml.g5.2xlarge": 1.5})
    assert main(["prices", "refresh"]) == 5, "without a name: the lists that are stored"
    assert "cannot be reached" in capsys.readouterr().err and prices.file_of(home, LIST).read_bytes() == before


def store(
    home: Path, name: str, usd: dict[str, float], as_of: str = "2026-11-18", source: str = "AWS's price list 7"
) -> bytes:
    """Store a list as `refresh` does; return its bytes."""
    path = prices.file_of(home, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": name, "usd_per_hour": usd, "source": source, "as_of": as_of}))
    return path.read_bytes()


# -- Google ------------------------------------------------------------------------------------------------------------


def sku(description: str, usd: float, unit: str = "h", region: str = "us-central1", usage: str = "OnDemand") -> dict:
    units = int(usd)
    price = {"currencyCode": "USD", "units": str(units), "nanos": round((usd - units) * 1e9)}
    expression = {"usageUnit": unit, "tieredRates": [{"startUsageAmount": 0, "unitPrice": price}]}
    return {
        "description": description,
        "category": {"usageType": usage},
        "serviceRegions": [region],
        "pricingInfo": [{"pricingExpression": expression}],
    }


# The SKUs that were billed for an a3-highgpu-8g, and those of N1 from Google's page (facts of 2025-08-16 and 2026-10-07).
SKUS = [
    [
        sku("Vertex AI: Training/Pipelines on NVIDIA H100 80GB in Iowa", 11.2660332),
        sku("Vertex AI: Training/Pipelines on A3 Instance Core in Iowa", 0.0293227),
        sku("Vertex AI: Training/Pipelines on A3 Instance RAM in Iowa", 0.0025534, "GiBy.h"),
        sku("Vertex AI: Training/Pipelines management fee on NVIDIA H100 80GB in Iowa", 1.4694826),
        sku("Vertex AI: Training/Pipelines on NVIDIA Tesla T4 in Iowa", 0.4025),
        sku("Vertex AI: Training/Pipelines on NVIDIA Tesla T4 in Belgium", 9.0, region="europe-west1"),
    ],
    [
        sku("Vertex AI: Training/Pipelines on N1 Predefined Instance Core running in Iowa", 0.03635265),
        sku("Vertex AI: Training/Pipelines on N1 Predefined Instance Ram running in Iowa", 0.00487255, "GiBy.h"),
        sku("Spot Preemptible Vertex AI: Training/Pipelines on N1 Predefined Instance Core running in Iowa", 0.001),
        sku("Vertex AI: Training/Pipelines on A2 Instance Core in Iowa", 0.03),
        sku("Vertex AI: Training/Pipelines on A2 Instance Core in Americas", 0.04),
        sku("Vertex AI: Training/Pipelines on A2 Instance Ram in Iowa", 0.004, "GiBy.h"),
        sku("Vertex AI: Training/Pipelines on NVIDIA Tesla A100 in Iowa", 3.4),
    ],
]


def test_googles_catalogue_makes_machines_of_their_parts(provider, home: Path, monkeypatch):
    paths: list[str] = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        paths.append(handler.path)
        second = "pageToken=next%2Fpage" in handler.path
        body = {"skus": SKUS[second], "nextPageToken": "" if second else "next/page"}
        send(handler, 200, json.dumps(body).encode())

    received = provider(reply)
    monkeypatch.setenv("MY_KEY", KEY)
    assert main(["prices", "refresh", "vertex/us-central1", "--google-key-env", "MY_KEY"]) == 0
    found = prices.load(home, "vertex/us-central1")
    assert found and found.source == "Google's Billing Catalog" and not found.estimate
    assert found.usd_per_hour["a3-highgpu-8g"] == pytest.approx(101.007352, abs=1e-5), (
        "as it was billed, without a fee twice"
    )
    assert found.usd_per_hour["n1-standard-4"] == pytest.approx(0.21849885, abs=1e-6)
    assert found.usd_per_hour["n1-standard-4+NVIDIA_TESLA_T4:1"] == pytest.approx(0.21849885 + 0.4025, abs=1e-6)
    assert "a2-highgpu-1g" not in found.usd_per_hour, "its cores have two prices"
    assert "a3-megagpu-8g" not in found.usd_per_hour and "g2-standard-4" not in found.usd_per_hour
    assert len(paths) == 2 and not any(KEY in path for path in paths)
    assert all(headers["x-goog-api-key"] == KEY for headers in received)


GOOGLE_HOSTILE: dict[str, Reply] = {
    "refused": lambda handler: send(handler, 403, f'{{"error": "key {KEY} is not valid"}}'.encode()),
    "a redirect": lambda handler: send(handler, 302, Location="http://127.0.0.1:1/?key=" + KEY),
    "no JSON": lambda handler: send(handler, 200, b"<html>"),
    "too deep": lambda handler: send(handler, 200, b"[" * 500_000),
    "another shape": lambda handler: send(handler, 200, b'{"skus": [{"description": 7}]}'),
    "an infinite price": lambda handler: send(
        handler, 200, json.dumps({"skus": SKUS[0]}).replace('"11"', "1e400").encode()
    ),
    "no object": lambda handler: send(handler, 200, b"[1, 2]"),
    "too large": lambda handler: send(handler, 200, b" " * (2 << 20)),
    "pages without end": lambda handler: send(handler, 200, b'{"skus": [], "nextPageToken": "x"}'),
}


@pytest.mark.parametrize("case", GOOGLE_HOSTILE)
def test_googles_errors_keep_the_list_and_never_show_the_key(case: str, provider, home: Path, monkeypatch, capsys):
    monkeypatch.setattr(download, "MAX_PAGE_BYTES", 1 << 20)
    monkeypatch.setenv("MY_KEY", KEY)
    before = store(home, "vertex/us-central1", {"n1-standard-4": 0.2})
    provider(GOOGLE_HOSTILE[case])
    assert main(["prices", "refresh", "--google-key-env", "MY_KEY"]) == 5
    shown = capsys.readouterr()
    assert KEY not in shown.out + shown.err and "vertex/us-central1: " in shown.err
    assert prices.file_of(home, "vertex/us-central1").read_bytes() == before


def test_a_key_that_is_not_set_is_said(monkeypatch, capsys):
    monkeypatch.delenv("MY_KEY", raising=False)
    assert main(["prices", "refresh", "vertex/us-central1", "--google-key-env", "MY_KEY"]) == 2
    assert "the variable is not set" in capsys.readouterr().err


# -- SkyPilot's catalogue ------------------------------------------------------------------------------------------------

GCP = """InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice
a3-highgpu-8g,208.0,1872.0,,,,us-central1,us-central1-a,9.46006,2.88933
a2-highgpu-1g,12.0,85.0,,,,us-central1,us-central1-a,0.73948,0.36975
g2-standard-4,4.0,16.0,,,,us-central1,us-central1-a,0.14678,0.03
n1-standard-4,4.0,15.0,,,,us-central1,us-central1-a,0.189999,0.04
n1-standard-4,4.0,15.0,,,,europe-west4,europe-west4-a,0.2092,0.04
,,,H100,8.0,"{'Gpus': []}",us-central1,us-central1-a,78.37240456,20.0
,,,A100,1.0,"{'Gpus': []}",us-central1,us-central1-a,2.933908,1.0
,,,T4,1,"{'Gpus': []}",us-central1,us-central1-a,0.35,0.1
"""
AWS = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone,Arch
g5.12xlarge,A10G,4,48.0,192.0,"{'Gpus': []}",5.672,2.1,us-east-1,use1-az1,x86_64
g5.12xlarge,A10G,4,48.0,192.0,"{'Gpus': []}",5.672,2.3,us-east-1,use1-az2,x86_64
g5.12xlarge,A10G,4,48.0,192.0,"{'Gpus': []}",6.328,2.3,eu-west-1,euw1-az2,x86_64
p9.huge,X,4,48.0,192.0,,,2.3,us-east-1,use1-az2,x86_64
"""


def catalogue(handler: BaseHTTPRequestHandler) -> None:
    texts = {"/gcp/vms.csv": GCP, "/aws/vms.csv": AWS}
    send(handler, 200 if handler.path in texts else 404, texts.get(handler.path, "").encode())


def test_a_public_list_for_machines_of_ones_own(provider, home: Path):
    provider(catalogue)
    assert refresh.refresh(home, "aws/us-east-1").usd_per_hour == {"g5.12xlarge": 5.672}
    found = refresh.refresh(home, "gcp/us-central1").usd_per_hour
    assert found["a2-highgpu-1g"] == pytest.approx(3.673388) and found["n1-standard-4"] == 0.189999
    assert "g2-standard-4" not in found, "its GPU has no row: a price without it would be wrong"


def test_without_a_key_prices_of_vertex_are_estimates(provider, home: Path):
    provider(catalogue)
    found = refresh.refresh(home, "vertex/us-central1")
    assert "1.15 times Compute Engine" in found.estimate
    assert found.usd_per_hour["a3-highgpu-8g"] == pytest.approx(101.007, abs=1e-2), "it was billed 101.007352"
    assert found.usd_per_hour["n1-standard-4"] == pytest.approx(0.21849885, abs=1e-6)
    known = {machines.priced_name(machine) for machine in machines.load("vertex")}
    assert {*found.usd_per_hour} <= known


@pytest.mark.parametrize(
    "text", ["Region,Price\nx,y\n", "Region,Price,InstanceType\nus-east-1,free,a\n", "\n\n", "a" * 200_000]
)
def test_a_catalogue_of_another_shape_is_refused(text: str, provider, home: Path):
    provider(lambda handler: send(handler, 200, text.encode()))
    with pytest.raises(BackendError):
        refresh.refresh(home, "aws/us-east-1")
    assert not (home / "prices").exists()
