"""Write the price lists that cloudtrain ships, cloudtrain/backends/*/prices.csv, from public repositories.

    python benchmarks/price_lists.py --google REPO --nodes REPO [--check]

REPO are git directories, with history: of Cyclenerd/google-cloud-pricing-cost-calculator (Compute Engine, from Google's
Billing Catalog; its pricing.yml of 30 days, for the range of spot prices), and of aws/karpenter-provider-aws (EC2, from
AWS's price list). Figures that they lack stand in OWN, each with its source. --check writes nothing: it exits with 1 where
a list differs.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from cloudtrain.backends import machines
from cloudtrain.backends.vertex.prices import FACTOR

BACKENDS = Path(__file__).parents[1] / "cloudtrain" / "backends"
COLUMNS = ("list", "machine", "usd_per_hour", "spot_low", "spot_high", "source", "note")
NEWEST, OLDEST = "fd66b26", "2026-07-01"  # the newest pricing.yml below 4 MiB, which snapshots lack above
REGIONS = ("us-central1", "europe-west4", "asia-southeast1")
# Of one GPU that is attached to N1, in REGIONS; 0: not sold there.
ATTACHED = {"T4": (0.35, 0.35, 0.37), "P4": (0.6, 0.65, 0.65), "V100": (2.48, 2.55, 0.0), "P100": (1.46, 1.6, 0.0)}
# us-central1: on demand, spot. Of Google's price page as copied on 2026-09-19.
OWN = {"a3-megagpu-8g": (93.400713, 55.896), "a3-ultragpu-8g": (84.806908, 50.872)}
WHY_NOT = {
    "a4-highgpu-8g": "sold as spot, flex-start or reservation only: Google publishes no price on demand",
    "a4x-highgpu-4g": "sold by reservation only: Google publishes no price",
}
# SageMaker's price over EC2's of the same machine, as on the machines of the family (or of its size) that have both.
OVER_EC2 = {
    "g7.": 1.25, "p2.": 1.25, "p3.2xlarge": 1.25, "p3.8xlarge": 1.2, "p3": 1.15, "p5en": 1.15, "p6-": 1.15, "trn1n": 1.15,
}  # fmt: skip
STUDIO = {"g7e.8xlarge": 6.5853, "g7e.24xlarge": 20.7152, "g7e.48xlarge": 41.4304}  # us-west-2, 2026-09-01
NOT_EC2 = "AWS's list has no price on demand: it is sold in capacity blocks and training plans"
GOOGLE_HEAD = """\
# Prices of Compute Engine (gcp) and of Vertex AI's custom training (vertex) in USD an hour; written by benchmarks/price_lists.py.
# spot_low, spot_high: over the lists of 2026-07-02 to 2026-07-30. A machine `*`: the highest factor of its region over
# us-central1, for machines without a row.
# home: us-central1
# vertex is derived: 1.15 times Compute Engine's price without local SSD; on spot, Compute Engine's spot price and 0.15 times
# that base (the bill in zenn.dev/google_cloud_jp/articles/dws-flex-new-skus, 2025-08-16).
# gcosts: 2026-07-30, Apache-2.0, https://github.com/Cyclenerd/google-cloud-pricing-cost-calculator/blob/fd66b26/pricing.yml
# terra: 2024-09-24, BSD-3-Clause, https://github.com/DataBiosphere/terra-ui/blob/4502e32c7/src/analysis/utils/gce-machines.ts
# Google: 2026-09-19, as copied by others, https://cloud.google.com/products/compute/pricing/accelerator-optimized
"""
AWS_HEAD = """\
# Prices of EC2 (aws) on demand, and of SageMaker's training where machines.csv has none, in USD an hour; written by
# benchmarks/price_lists.py. Spot prices: no list with a licence was found; SageMaker's discount is in its billed seconds.
# home: us-east-1
# karpenter: 2026-07-20, Apache-2.0, https://github.com/aws/karpenter-provider-aws/blob/6fc13b523/pkg/providers/pricing/zz_generated.pricing_aws.go
# AWS: 2026-09-01, as copied by others, https://pricing.us-east-1.amazonaws.com/offers/v1.0/aws/AmazonSageMaker/current/us-west-2/index.csv
"""
Row = tuple[str, str, object, object, object, str, str]


def git(repo: str, *words: str) -> str:
    return subprocess.run(["git", "-C", repo, *words], check=True, capture_output=True, text=True).stdout


class Google:
    """Compute Engine's prices of 30 days."""

    def __init__(self, repo: str) -> None:
        commits = git(repo, "log", "--format=%h", f"--since={OLDEST}", NEWEST, "--", "pricing.yml").split()
        texts = (git(repo, "show", f"{each}:pricing.yml") for each in commits)
        lists = [yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))["compute"] for text in texts]
        self.newest, self.all = lists[0], lists

    def usd(self, name: str, region: str) -> float | None:
        return self._cost(self.newest, name, region).get("hour")

    def spot(self, name: str, region: str) -> tuple[float, float] | None:
        found = [usd for each in self.all if (usd := self._cost(each, name, region).get("hour_spot"))]
        return (min(found), max(found)) if found else None

    def ssd(self, name: str, region: str) -> float:
        """Return the price of a machine's local SSD, which its price has in it."""
        size_gb = self.newest["instance"].get(name, {}).get("local-ssd", 0) if name.startswith(("a2-", "a3-")) else 0
        return size_gb * self.newest["storage"]["local"]["cost"][region]["month"] / 730

    @staticmethod
    def _cost(compute: dict, name: str, region: str) -> dict:
        return compute["instance"].get(name, {}).get("cost", {}).get(region) or {}


def of_google(google: Google) -> Iterator[Row]:
    derived, known = f"{FACTOR} x Compute Engine", set()
    for at, region in enumerate(REGIONS):
        for machine in machines.load("vertex"):
            name, gpu = machines.priced_name(machine), machine.accelerator.partition("-")[0]
            usd, spot, source = google.usd(machine.name, region), google.spot(machine.name, region), "gcosts"
            if name != machine.name:  # N1 with GPUs
                each = ATTACHED[gpu][at]
                usd, spot, source = (usd + each * machine.accelerators if usd and each else None), None, "terra"
            elif usd is None and region == REGIONS[0] and name in OWN:
                usd, most, source = *OWN[name], "Google"
                spot = (most, most)
            if usd is None:
                if region == REGIONS[0] or gpu in ATTACHED:
                    why = WHY_NOT.get(name) or f"{gpu} is not sold there"
                    for whose in ("gcp", "vertex"):
                        yield f"{whose}/{region}", name, "", "", "", "", why
                continue
            known.add(machine.name)
            base = usd - google.ssd(name, region)
            yield f"gcp/{region}", name, *numbers(usd, *(spot or ())), source, ""
            fee = (FACTOR - 1) * base
            yield (
                f"vertex/{region}",
                name,
                *numbers(FACTOR * base, *((each + fee) for each in spot or ())),
                source,
                derived,
            )
    for region in sorted(google.newest["instance"]["n1-standard-4"]["cost"]):
        pairs = [(google.usd(name, region), google.usd(name, REGIONS[0])) for name in sorted(known)]
        ratios = [here / there for here, there in pairs if here and there]
        if region != REGIONS[0] and ratios:
            note = f"{min(ratios):.2f} to {max(ratios):.2f} by machine"
            for whose in ("gcp", "vertex"):
                yield f"{whose}/{region}", "*", round(max(ratios), 3), "", "", "gcosts", note


def numbers(usd: float, low: float | str = "", high: float | str = "") -> tuple[object, object, object]:
    return tuple(f"{each:.6g}" if isinstance(each, float) else each for each in (float(usd), low, high))  # type: ignore[return-value]


def of_aws(repo: str) -> Iterator[Row]:
    text = git(repo, "show", "6fc13b523:pkg/providers/pricing/zz_generated.pricing_aws.go")
    ec2 = {name: float(usd) for name, usd in re.findall(r'"([a-z0-9-]+\.[a-z0-9-]+)": ([0-9.]+)', text)}
    for machine in machines.load("sagemaker"):
        name = machine.name.removeprefix("ml.")
        usd = ec2.get(name)
        yield "aws/us-east-1", name, *((*numbers(usd), "karpenter", "") if usd else ("", "", "", "", NOT_EC2))
        if machine.usd_per_hour is None:
            over = next((each for begin, each in OVER_EC2.items() if name.startswith(begin)), None)
            if name in STUDIO:
                yield "sagemaker/us-east-1", machine.name, *numbers(STUDIO[name]), "AWS", "Studio's price in us-west-2"
            elif usd and over:
                yield "sagemaker/us-east-1", machine.name, *numbers(usd * over), "karpenter", f"{over} x EC2"
            else:
                yield "sagemaker/us-east-1", machine.name, "", "", "", "", NOT_EC2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--google", required=True)
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--check", action="store_true")
    words = parser.parse_args()
    different = 0
    for folder, head, rows in (
        ("vertex", GOOGLE_HEAD, of_google(Google(words.google))),
        ("sagemaker", AWS_HEAD, of_aws(words.nodes)),
    ):
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([COLUMNS, *sorted(dict.fromkeys(rows), key=lambda row: row[:1])])
        path, text = BACKENDS / folder / "prices.csv", head + out.getvalue()
        same = path.is_file() and path.read_text("utf-8") == text
        different += not same
        print(f"{path}: {text.count(chr(10))} lines{'' if same else ', different'}")
        if not words.check:
            path.write_text(text, "utf-8")
    return int(words.check and different > 0)


if __name__ == "__main__":
    sys.exit(main())
