"""Refused, the error that ends an attempt before training begins."""

from __future__ import annotations


class Refused(Exception):
    """Training cannot begin: one sentence that says why. The launcher exits with 78."""


def one_line(error: BaseException) -> str:
    """Return an error's type and first line, at most 300 characters."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]
