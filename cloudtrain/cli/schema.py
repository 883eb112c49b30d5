"""cloudtrain schema: print the JSON schema of the job file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from cloudtrain.cli.view import options, terminal


@options.command()
@click.option("-o", "--output", metavar="FILE", type=click.Path(), help="Write the schema to a file.")
def command(output: str | None) -> int:
    """Print the JSON schema of the job file.

    An editor with a YAML language server checks a job file whose first line is
    `# yaml-language-server: $schema=job.schema.json`. `cloudtrain init` writes that line and the schema.
    """
    text = schema_text()
    if output and output != "-":
        Path(output).write_text(text, "utf-8")
        terminal.print_lines(f"written to {output}")
    else:
        sys.stdout.write(text)
    return 0


def schema_text() -> str:
    """Return the schema as indented JSON."""
    from cloudtrain.job.job import schema

    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
