"""The table of pages: a path, a title, and the function that shows it, imported when the console starts.

The function is `async def show(...)`; its parameters are those of the path (`run_id`) and of the query. What it makes
lands in the page's main part. It may raise CloudtrainError: the page then says the sentence and the hint.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """A page of the console; `key` (one letter) leads to it from everywhere, and it then stands in the header."""

    path: str
    title: str
    show: str  # module:function below cloudtrain.console
    key: str = ""


PAGES = (
    Page("/", "Runs", "pages.runs:show", "r"),
    Page("/runs/{run_id}", "Run", "pages.run:show"),
    Page("/new", "New job", "pages.newjob:show", "n"),
    Page("/compare", "Compare", "pages.compare:show"),
)
