"""The second step of a new job: where it runs, with doctor's findings beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cloudtrain.cli import doctor
from cloudtrain.console import fields, shell, text
from cloudtrain.console.controls import Controls
from cloudtrain.console.draft import Draft
from cloudtrain.console.fields import Step
from cloudtrain.errors import CloudtrainError

_MARKS = {True: ("ok", "ct-good"), False: ("problem", "ct-bad"), None: ("note", "")}


class Place:
    """The step over one draft."""

    def __init__(self, draft: Draft, controls: Controls) -> None:
        self.draft = draft
        self.controls = controls
        self._drawn = ""  # the target whose options are drawn
        self._options: set[str] = set()  # names of the options that have controls
        self._asked = 0  # how often doctor was asked; only the last answer is shown
        self._looked = False

    @property
    def target(self) -> str:
        """The target that is written, or the default."""
        node = self.draft.form.get(("target",))
        return node if isinstance(node, str) and node else "local"

    def draw(self) -> None:
        """Draw the step."""
        from nicegui import ui

        members = [field for field in fields.job_fields() if field.step is Step.INFRASTRUCTURE]
        place, *others = [list(group) for group in _groups(members)]
        try:
            names = tuple(fields.backends_by_target(self.draft.form.folder))
        except CloudtrainError:
            names = ()  # what is wrong with the configuration is among the problems of the job
        place = [replace(f, kind="choice", choices=names) if f.name == "target" else f for f in place]
        with ui.element("div").classes("ct-two"):
            with ui.element("div").classes("ct-stack"):
                self.controls.draw_groups(place)
                self.options = ui.element("div").classes("ct-stack")
                for group in others:
                    self.controls.draw_groups(group)
            with ui.element("section").classes("ct-card ct-beside"):
                shell.heading("Doctor", 2)
                self.said = ui.label("").classes("ct-dim ct-small").props('role="status"')
                self.findings = ui.element("ul").classes("ct-findings")
                self.button = ui.button("Check", on_click=self.check, color=None).classes("ct-plain")

    async def follow(self) -> None:
        """Draw the options of the backend that is chosen now, if it is another one."""
        if self.target == self._drawn:
            return
        self._drawn = self.target
        self.controls.forget(self._options)
        self.options.clear()
        self.findings.clear()
        self._asked += 1
        self.button.set_enabled(True)
        self.said.set_text(f"What stands in the way here and at {text.clean(self.target, 60)}.")
        try:
            backend = fields.backends_by_target(self.draft.form.folder).get(self.target, "")
            members = list(fields.option_fields(backend)) if backend else []
        except CloudtrainError:
            members = []  # said at the target
        self._options = {field.name for field in members}
        if members:
            members = [replace(field, default=self._configured(field) or field.default) for field in members]
            with self.options:
                self.controls.draw_card(f"Options of {backend}", members)
        self.controls.show_problems(self.controls.problems)
        if self._looked:
            await self.look()

    async def look(self) -> None:
        """Check a place that needs no network as soon as the step is seen."""
        self._looked = True
        await self.follow()
        if self.target == "local" and not list(self.findings):
            await self.check()

    async def check(self) -> None:
        """Ask doctor, and show every finding as soon as there is one."""
        from nicegui import ui

        self._asked += 1
        mine, target = self._asked, self.target
        self.findings.clear()
        self.button.set_enabled(False)
        self.said.set_text("Looking…")
        found = doctor.findings(target, _values(self.draft, target))
        bad = 0
        try:
            while (finding := await asyncio.to_thread(_next, found)) is not None:
                if mine != self._asked:
                    return
                bad += finding.ok is False
                mark, color = _MARKS[finding.ok]
                with self.findings, ui.element("li"):
                    ui.label(mark).classes(f"ct-state {color}")
                    with ui.element("div"):
                        ui.label(finding.what).classes("ct-found-what")
                        hint = f" ({finding.hint})" if finding.hint else ""
                        ui.label(text.clean(f"{finding.message}{hint}")).classes("ct-dim ct-small")
        except CloudtrainError as error:
            bad += 1
            with self.findings, ui.element("li"):
                ui.label("problem").classes("ct-state ct-bad")
                ui.label(shell.format_error(error))
        if mine == self._asked:
            self.said.set_text(f"{bad} problem{'s' * (bad != 1)}" if bad else "Everything that was looked at is fine.")
            self.button.set_enabled(True)

    def _configured(self, field: fields.Field) -> str:
        """Return what the target says in cloudtrain.toml, which counts where the job says nothing."""
        from cloudtrain.job import targets

        try:
            named = targets.named_targets(self.draft.form.folder).get(self.target)
        except CloudtrainError:
            return ""
        value = named.options.value.get(field.path[-1]) if named else None
        return f"{value} (cloudtrain.toml)" if value is not None else ""


def _next(found: Iterator[doctor.Finding]) -> doctor.Finding | None:
    return next(found, None)


def _groups(members: list[fields.Field]) -> Iterator[list[fields.Field]]:
    from itertools import groupby

    for _, group in groupby(members, key=lambda field: field.group):
        yield list(group)


def _values(draft: Draft, target: str) -> dict[str, Any]:
    """Return the options that the form has for a target's backend, as plain values."""
    try:
        backend = fields.backends_by_target(draft.form.folder).get(target, target)
        document, _ = draft.form.document()
    except CloudtrainError:
        return {}
    found = (document.value.get("options") or {}).get(backend)
    return dict(found) if isinstance(found, dict) else {}
