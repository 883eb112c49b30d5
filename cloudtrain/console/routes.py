"""The table of pages: path, title, and the function that shows the page, imported when the console starts.

The function is `async def show(...)`. Its parameters come from the path (`run_id`) and the query. Its elements go into the
main part of the page. It may raise CloudtrainError: the page then shows the message and the hint.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """A page of the console. `key` is its keyboard shortcut (one letter); a page with a key has a link in the header."""

    path: str
    title: str
    show: str  # module:function below cloudtrain.console
    key: str = ""


PAGES = (
    Page("/", "Runs", "pages.runs:show", "r"),
    Page("/runs/{run_id}", "Run", "pages.run:show"),
    Page("/new", "New job", "pages.newjob:show", "n"),
    Page("/sweeps", "Sweeps", "pages.sweeps:show", "s"),
    Page("/sweeps/{sweep_id}", "Sweep", "pages.sweep:show"),
    Page("/compare", "Compare", "pages.compare:show"),
)
