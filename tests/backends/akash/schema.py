"""Akash's public schema of SDLs, and a check by it. Source and licence are in the schema's first lines."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SCHEMA = Path(__file__).parent / "sdl-input.schema.yaml"


@cache
def validator() -> Any:
    from jsonschema import Draft7Validator

    return Draft7Validator(yaml.safe_load(SCHEMA.read_text()))


def check_sdl(sdl: Mapping[str, Any]) -> None:
    """Raise ValueError with what the public schema says against an SDL."""
    if errors := sorted(validator().iter_errors(sdl), key=str):
        raise ValueError("; ".join(f"{'/'.join(map(str, error.path))}: {error.message[:200]}" for error in errors))
