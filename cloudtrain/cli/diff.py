"""cloudtrain diff: show the differences between two runs, or between two plans."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import Plan
from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.errors import BadRequest
from cloudtrain.job.units import format_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cloudtrain.report.compare import Difference

VALUE_WIDTH = 60  # characters
PATCH_LINES = 40  # shown of the difference between the sources
FILES = 20  # of them that are named


@options.command()
@options.argument(
    "first", "RUN|PLAN", f"{options.RUN} Or a file that `plan -o` wrote.", shell_complete=options.complete_runs
)
@options.argument(
    "second", "RUN|PLAN", "What to compare it with: another run, or another plan.", shell_complete=options.complete_runs
)
@options.json_option
def command(first: str, second: str, as_json: bool) -> int:
    """Show the differences between two runs or two plans.

    Of two files that `plan -o` wrote it compares cost, job, request and source. Of two runs it compares the jobs,
    hyperparameters, requests to the platform, sources (commit and uncommitted changes), installed packages and
    results: state, exit code and last metrics. Where both packages are stored here, it names the files that differ
    and shows the changed lines of text files, also without git; else it compares the patches of git. Differences
    that come from the runs' own ids are not shown. The exit code is 0, also when they differ.

    \b
    cloudtrain diff tiny-lm-261124 tiny-lm-261125
    cloudtrain diff main.json plan.json
    """
    from cloudtrain.report import compare, sources

    if first.endswith(".json") and second.endswith(".json"):
        return _diff_plans(first, second, as_json)
    first_run, second_run = runs.find(first), runs.find(second)
    first_run.refresh()
    second_run.refresh()
    differences = compare.between(first_run.store, first_run.run_id, second_run.run_id)
    found = sources.diff(first_run.store, first_run.run_id, second_run.run_id)
    patches = found.text
    if found.unknown:
        patches = compare.diff_patches(first_run.store, first_run.run_id, second_run.run_id)
    if as_json:
        data = {
            "runs": [first_run.run_id, second_run.run_id],
            "differences": [asdict(row) for row in differences],
            "files": found.files,
            "patch": patches,
        }
        terminal.print_json(data, indent=2)
        return 0
    terminal.print_lines(f"{first_run.run_id}  ->  {second_run.run_id}", style="bold")
    _print_differences(differences)
    if packages := compare.describe_packages(first_run.store, first_run.run_id, second_run.run_id):
        terminal.print_lines("", packages)
    _print_files(found.files)
    if found.unknown:
        terminal.print_lines("", f"source files are not compared, only patches of git: {found.unknown}")
    lines = patches.splitlines()
    if lines:
        terminal.print_lines("", "difference of the patches" if found.unknown else "source lines", style="bold")
        terminal.print_lines(*(f"  {line}" for line in lines[:PATCH_LINES]))
        if len(lines) > PATCH_LINES:
            terminal.print_lines(f"  ... and {format_count(len(lines) - PATCH_LINES, 'line')} (--json has them all)")
    return 0


def _print_files(files: Mapping[str, str]) -> None:
    if not files:
        return
    terminal.print_lines("", "source files", style="bold")
    shown = list(files.items())[:FILES]
    terminal.print_lines(*(f"  {change:8} {path}" for path, change in shown))
    if len(files) > FILES:
        terminal.print_lines(f"  ... and {format_count(len(files) - FILES, 'file')} (--json has them all)")


def _print_differences(differences: Sequence[Difference]) -> None:
    if not differences:
        terminal.print_lines("nothing differs")
    for section, rows in groupby(differences, key=lambda row: row.section):
        terminal.print_lines("", section, style="bold")
        terminal.print_table(
            ("  value", "first", "second"), [(f"  {r.path}", _text(r.first), _text(r.second)) for r in rows]
        )


def _diff_plans(first: str, second: str, as_json: bool) -> int:
    from cloudtrain.report import plans

    made = []
    for name in (first, second):
        try:
            made.append(Plan.from_json(Path(name).read_text("utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(
                f"{name} cannot be read: {error}", "cloudtrain plan job.yaml -o plan.json writes one"
            ) from None
    differences = plans.between(*made)
    if as_json:
        terminal.print_json({"plans": [first, second], "differences": [asdict(row) for row in differences]}, indent=2)
        return 0
    terminal.print_lines(f"{first}  ->  {second}", style="bold")
    costs = [(plan.at_most or {}).get("usd") for plan in made]
    if any(cost is not None for cost in costs):
        old, new = ("not known" if cost is None else f"{cost:.2f} USD" for cost in costs)
        terminal.print_lines(f"cost at most {new}" + (f", was {old}" if old != new else ", as before"))
    _print_differences(differences)
    return 0


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= VALUE_WIDTH else text[: VALUE_WIDTH - 3] + "..."
