"""The third step of a new job: what is packaged, listed as `cloudtrain package --list` lists it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cloudtrain.cli.view.runs import format_size
from cloudtrain.console import fields, shell, text
from cloudtrain.console.controls import Controls, format_problem
from cloudtrain.console.draft import Draft, Listing
from cloudtrain.console.fields import Field, Step
from cloudtrain.console.form import GitSource
from cloudtrain.errors import BadJob, CloudtrainError

SHOWN = 300  # files of a listing
_FOLDER, _GIT = "A folder", "A git repository"


class Sources:
    """The step over one draft."""

    def __init__(self, draft: Draft, controls: Controls) -> None:
        self.draft = draft
        self.controls = controls
        self.field = next(field for field in fields.job_fields() if field.name == "source")
        self._asked = 0
        self._listed = ""  # the values for which the listing was made

    def draw(self) -> None:
        """Draw the step."""
        from nicegui import ui

        members = [field for field in fields.job_fields() if field.step is Step.SOURCE]
        mine = [field for field in members if field.group == "Source" and field.name != "source"]
        with ui.element("div").classes("ct-two"):
            with ui.element("div").classes("ct-stack"):
                self.controls.draw_card("Source", mine, above=self._source)
                self.controls.draw_groups([field for field in members if field.group != "Source"])
            with ui.element("section").classes("ct-card ct-beside"):
                shell.heading("What is sent", 2)
                self.said = ui.label("").classes("ct-dim ct-small").props('role="status"')
                self.listing = ui.element("div")
                self.button = ui.button("List the files", on_click=self.list, color=None).classes("ct-plain")

    async def look(self) -> None:
        """List a folder as soon as the step is seen; a repository when it is asked for, since that takes the network."""
        if self._address().startswith("git+") and not self._kept():
            self.said.set_text("The repository is fetched when you ask for it.")
            return
        if self._listed != self._values():
            await self.list()

    async def list(self) -> None:
        """Show what the source would send."""
        self._asked += 1
        mine, draft = self._asked, self.draft.snapshot()
        self._listed = self._values()
        self.said.set_text("Packaging…")
        self.listing.clear()
        self.button.set_enabled(False)
        try:
            found: Listing | None = await asyncio.to_thread(draft.list_source)
            words = ""
        except BadJob as error:
            found, words = None, "; ".join(map(format_problem, error.problems))
        except CloudtrainError as error:
            found, words = None, shell.format_error(error)
        if mine == self._asked:
            self.button.set_enabled(True)
            self._show(found, words)

    def _show(self, found: Listing | None, words: str) -> None:
        from nicegui import ui

        self.said.set_text("")
        with self.listing:
            if found is None:
                ui.label(words).classes("ct-callout ct-callout-bad").props('role="alert"')
                return
            if found.problem:
                told = ui.label(text.clean(format_problem(found.problem, bare=True), 4000)).classes(
                    "ct-callout ct-callout-bad"
                )
                told.props('role="alert"')
            total = format_size(sum(file.size for file in found.files))
            count = f"{len(found.files):,} file{'s' * (len(found.files) != 1)}, {total}"
            packed = f", {format_size(found.packed_bytes)} packed" if found.packed_bytes else ""
            self.said.set_text(f"{count}{packed}" if found.files else "")
            with ui.element("p").classes("ct-small ct-dim ct-mono"):
                ui.label(text.clean(found.root) + (f" at {found.commit}" if found.commit else ""))
            if found.files:
                self._files(found)

    def _files(self, found: Listing) -> None:
        from nicegui import ui

        with ui.element("div").classes("ct-scroll ct-listing").props('tabindex=0 role="region" aria-label="Files"'):
            with ui.element("table").classes("ct-table"):
                with ui.element("thead"), ui.element("tr"):
                    for head in ("File", "Size"):
                        with ui.element("th").classes("ct-number" if head == "Size" else ""):
                            ui.label(head)
                with ui.element("tbody"):
                    for file in found.files[:SHOWN]:
                        with ui.element("tr"):
                            with ui.element("td").classes("ct-mono"):
                                ui.label(text.clean(file.path))
                            with ui.element("td").classes("ct-number"):
                                ui.label(format_size(file.size))
        if len(found.files) > SHOWN:
            ui.label(f"and {len(found.files) - SHOWN:,} more: cloudtrain package --list names all").classes(
                "ct-dim ct-small"
            )

    # -- the address --------------------------------------------------------------------------------------------------

    def _source(self) -> None:
        from nicegui import ui

        if self.draft.parent:
            same = ui.switch(f"The very source that {text.clean(self.draft.parent)} had", value=self.draft.same_source)

            async def turn() -> None:
                self.draft.same_source = bool(same.value)
                body.set_visibility(not same.value)
                await self.look()

            same.on_value_change(turn)
        body = ui.element("div").classes("ct-stack")
        body.set_visibility(not self.draft.same_source)
        with body:
            is_git = self._address().startswith("git+")
            chosen = ui.radio([_FOLDER, _GIT], value=_GIT if is_git else _FOLDER).props('inline aria-label="Source"')
            area = ui.element("div").classes("ct-fields")

            def draw() -> None:
                self.controls.forget({"source"})
                area.clear()
                with area:
                    if chosen.value == _GIT:
                        self._git()
                    else:
                        self.controls.draw_field(
                            replace(self.field, label="Folder", help="Relative to the job file's folder.")
                        )

            def turned() -> None:
                if self._address().startswith("git+") != (chosen.value == _GIT):
                    self.controls.set_value(self.field, "." if chosen.value == _FOLDER else "git+https://")
                draw()

            chosen.on_value_change(turned)
            draw()

    def _git(self) -> None:
        from nicegui import ui

        parts = GitSource.parse(self._address())

        def put(**changes: str) -> None:
            nonlocal parts
            parts = parts._replace(**changes)
            self.controls.set_value(self.field, str(parts))

        told = (
            ("address", "source", "Repository", "https://host/repo or ssh://git@host/repo"),
            ("revision", "source.revision", "Revision", "Branch, tag or commit; left out: the default branch."),
            ("folder", "source.folder", "Folder in it", "Left out: all of it."),
        )
        for name, shown, label, help in told:
            field = Field((shown,), Step.SOURCE, "Source", "text", label, help)
            with ui.element("div").classes("ct-field"):
                made = ui.input(
                    label, value=getattr(parts, name), on_change=lambda e, n=name: put(**{n: e.value or ""})
                )
            self.controls.style(made, field)

    def _address(self) -> str:
        node = self.draft.form.get(("source",))
        return node if isinstance(node, str) else ""

    def _kept(self) -> bool:
        return bool(self.draft.parent) and self.draft.same_source

    def _values(self) -> str:
        """Return what the listing depends on, as text."""
        form = self.draft.form
        keys = ("source", "entrypoint", "environment", "allow_secrets", "allow_large", "allow_pointers")
        return repr([self._kept(), *(form.get((key,)) for key in keys)])
