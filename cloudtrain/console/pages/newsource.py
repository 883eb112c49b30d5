"""The step Source of a new job: the files that are packaged, as `cloudtrain plan --files` shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from cloudtrain.console import fields, shell, text
from cloudtrain.console.controls import Controls, format_problem
from cloudtrain.console.draft import Draft, Listing
from cloudtrain.console.fields import Field, Step
from cloudtrain.console.form import GitSource
from cloudtrain.errors import BadJob, CloudtrainError
from cloudtrain.job.units import format_size

MAX_FILES = 300  # files of a listing
PAUSE_S = 0.6  # without typing, before a source is listed
_FOLDER, _GIT = "A folder", "A git repository"


class SourceStep:
    """The step of one draft."""

    def __init__(self, draft: Draft, controls: Controls, is_open: Callable[[], bool]) -> None:
        self.draft = draft
        self.controls = controls
        self._open = is_open
        self.field = next(field for field in fields.job_fields() if field.name == "source")
        self._request_number = 0
        self._listed = ""  # the values for which the listing was made
        self._typed = ""  # the values at the last look

    def draw(self) -> None:
        """Draw the step."""
        from nicegui import ui

        members = [field for field in fields.job_fields() if field.step is Step.SOURCE]
        source_fields = [field for field in members if field.group == "Source" and field.name != "source"]
        with ui.element("div").classes("ct-two"):
            with ui.element("div").classes("ct-stack"):
                self.controls.draw_card("Source", source_fields, above=self._draw_source)
                self.controls.draw_groups([field for field in members if field.group != "Source"])
            with ui.element("section").classes("ct-card ct-beside"):
                shell.heading("Files to submit", 2)
                self.status_label = ui.label("").classes("ct-dim ct-small").props('role="status"')
                self.listing = ui.element("div")
                self.button = ui.button("List the files", on_click=self.list, color=None).classes("ct-plain")
        ui.timer(PAUSE_S, self._follow)

    async def _follow(self) -> None:
        """List the source again when what was typed has stayed the same for a moment."""
        before, self._typed = self._typed, self._listing_key()
        if self._typed == before and self._open():
            await self.shown()

    async def shown(self) -> None:
        """List a folder when the step is opened. A git repository is listed only on request: it needs the network."""
        if self._listed == self._listing_key():
            return
        if not self._address().startswith("git+") or self._reuses_parent():
            await self.list()
            return
        self.status_label.set_text("The repository is fetched when you list its files.")
        if self._listed:  # that list is of another source
            self._listed = ""
            self._request_number += 1
            self.listing.clear()
            self.button.set_enabled(True)

    async def list(self) -> None:
        """Show the files that the source would send."""
        self._request_number += 1
        request_number, draft = self._request_number, self.draft.snapshot()
        self._listed = self._listing_key()
        self.status_label.set_text("Packaging…")
        self.listing.clear()
        self.button.set_enabled(False)
        try:
            listing: Listing | None = await asyncio.to_thread(draft.list_source)
            message = ""
        except BadJob as error:
            listing, message = None, "; ".join(map(format_problem, error.problems))
        except CloudtrainError as error:
            listing, message = None, shell.format_error(error)
        if request_number == self._request_number:
            self.button.set_enabled(True)
            self._show(listing, message)

    def _show(self, listing: Listing | None, message: str) -> None:
        from nicegui import ui

        self.status_label.set_text("")
        with self.listing:
            if listing is None:
                ui.label(message).classes("ct-callout ct-callout-bad").props('role="alert"')
                return
            if listing.problem:
                alert = ui.label(text.clean(format_problem(listing.problem, bare=True), 4000)).classes(
                    "ct-callout ct-callout-bad"
                )
                alert.props('role="alert"')
            total = format_size(sum(file.size for file in listing.files))
            count = f"{len(listing.files):,} file{'s' * (len(listing.files) != 1)}, {total}"
            packed = f", {format_size(listing.packed_bytes)} packed" if listing.packed_bytes else ""
            self.status_label.set_text(f"{count}{packed}" if listing.files else "")
            with ui.element("p").classes("ct-small ct-dim ct-mono"):
                ui.label(text.clean(listing.root) + (f" at {listing.commit}" if listing.commit else ""))
            if listing.files:
                self._files(listing)

    def _files(self, listing: Listing) -> None:
        from nicegui import ui

        with ui.element("div").classes("ct-scroll ct-listing").props('tabindex=0 role="region" aria-label="Files"'):
            with ui.element("table").classes("ct-table"):
                with ui.element("thead"), ui.element("tr"):
                    for head in ("File", "Size"):
                        with ui.element("th").classes("ct-number" if head == "Size" else ""):
                            ui.label(head)
                with ui.element("tbody"):
                    for file in listing.files[:MAX_FILES]:
                        with ui.element("tr"):
                            with ui.element("td").classes("ct-mono"):
                                ui.label(text.clean(file.path))
                            with ui.element("td").classes("ct-number"):
                                ui.label(format_size(file.size))
        if len(listing.files) > MAX_FILES:
            ui.label(f"and {len(listing.files) - MAX_FILES:,} more: cloudtrain plan --files prints all").classes(
                "ct-dim ct-small"
            )

    # -- the address --------------------------------------------------------------------------------------------------

    def _draw_source(self) -> None:
        from nicegui import ui

        if self.draft.parent:
            same_source = ui.switch(
                f"The same source that {text.clean(self.draft.parent)} had", value=self.draft.same_source
            )

            async def switch_source() -> None:
                self.draft.same_source = bool(same_source.value)
                body.set_visibility(not same_source.value)
                await self.shown()

            same_source.on_value_change(switch_source)
        body = ui.element("div").classes("ct-stack")
        body.set_visibility(not self.draft.same_source)
        with body:
            is_git = self._address().startswith("git+")
            selection = ui.radio([_FOLDER, _GIT], value=_GIT if is_git else _FOLDER).props('inline aria-label="Source"')
            area = ui.element("div").classes("ct-fields")

            def draw() -> None:
                self.controls.forget({"source"})
                area.clear()
                with area:
                    if selection.value == _GIT:
                        self._draw_git()
                        self.controls.mark(self.field, area)
                    else:
                        self.controls.draw_field(
                            replace(self.field, label="Folder", help="Relative to the job file's folder.")
                        )

            def turned() -> None:
                if self._address().startswith("git+") != (selection.value == _GIT):
                    self.controls.set_value(self.field, "." if selection.value == _FOLDER else "git+https://")
                draw()

            selection.on_value_change(turned)
            draw()

    def _draw_git(self) -> None:
        from nicegui import ui

        parts = GitSource.parse(self._address())

        def put(**changes: str) -> None:
            nonlocal parts
            parts = parts._replace(**changes)
            self.controls.set_value(self.field, str(parts))

        parts_shown = (
            ("address", "source", "Repository", "https://host/repo or ssh://git@host/repo"),
            ("revision", "source.revision", "Revision", "Branch, tag or commit. Default: the default branch."),
            ("folder", "source.folder", "Folder in it", "Default: the whole repository."),
        )
        for name, field_name, label, help in parts_shown:
            field = Field((field_name,), Step.SOURCE, "Source", "text", label, help)
            with ui.element("div").classes("ct-field"):
                control = ui.input(
                    label, value=getattr(parts, name), on_change=lambda e, n=name: put(**{n: e.value or ""})
                )
            self.controls.style(control, field)

    def _address(self) -> str:
        node = self.draft.form.get(("source",))
        return node if isinstance(node, str) else ""

    def _reuses_parent(self) -> bool:
        return bool(self.draft.parent) and self.draft.same_source

    def _listing_key(self) -> str:
        """Return the values that the listing depends on, as text."""
        form = self.draft.form
        keys = ("source", "entrypoint", "environment", "allow_secrets", "allow_large", "allow_pointers")
        return repr([self._reuses_parent(), *(form.get((key,)) for key in keys)])
