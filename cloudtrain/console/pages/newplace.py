"""The step Infrastructure of a new job: target and its options, with doctor's findings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cloudtrain.backends import registry
from cloudtrain.cli import doctor
from cloudtrain.cli.view.machine_checks import Finding
from cloudtrain.console import fields, shell, text
from cloudtrain.console.controls import Controls
from cloudtrain.console.draft import Draft
from cloudtrain.console.fields import Step
from cloudtrain.errors import CloudtrainError

_MARKS = {True: ("ok", "ct-good"), False: ("problem", "ct-bad"), None: ("note", "")}


class TargetStep:
    """The step of one draft."""

    def __init__(self, draft: Draft, controls: Controls) -> None:
        self.draft = draft
        self.controls = controls
        self._drawn = ""  # the target whose options are drawn
        self._options: set[str] = set()  # names of the options that have controls
        self._request_number = 0  # of the last check; older checks are not shown
        self._was_shown = False

    @property
    def target(self) -> str:
        """The target of the form, or the default."""
        node = self.draft.form.get(("target",))
        return node if isinstance(node, str) and node else registry.DEFAULT

    def draw(self) -> None:
        """Draw the step."""
        from nicegui import ui

        members = [field for field in fields.job_fields() if field.step is Step.INFRASTRUCTURE]
        target_group, *other_groups = [list(group) for group in _by_group(members)]
        try:
            names = tuple(fields.backends_by_target(self.draft.form.folder))
        except CloudtrainError:
            names = ()  # problems of the configuration are shown with those of the job
        target_group = [replace(f, kind="choice", choices=names) if f.name == "target" else f for f in target_group]
        with ui.element("div").classes("ct-two"):
            with ui.element("div").classes("ct-stack"):
                self.controls.draw_groups(target_group)
                self.options = ui.element("div").classes("ct-stack")
                for group in other_groups:
                    self.controls.draw_groups(group)
            with ui.element("section").classes("ct-card ct-beside"):
                shell.heading("Doctor", 2)
                self.status_label = ui.label("").classes("ct-dim ct-small").props('role="status"')
                self.findings = ui.element("ul").classes("ct-findings")
                self.button = ui.button("Check", on_click=self.check, color=None).classes("ct-plain")

    async def update_options(self) -> None:
        """Draw the options of the chosen backend, if it has changed."""
        if self.target == self._drawn:
            return
        self._drawn = self.target
        self.controls.forget(self._options)
        self.options.clear()
        self.findings.clear()
        self._request_number += 1
        self.button.set_enabled(True)
        self.status_label.set_text(f"Checks of this machine and of {text.clean(self.target, 60)}.")
        try:
            backend = fields.backends_by_target(self.draft.form.folder).get(self.target, "")
            members = list(fields.option_fields(backend)) if backend else []
        except CloudtrainError:
            members = []  # shown at the target
        self._options = {field.name for field in members}
        if members:
            members = [replace(field, default=self._configured(field) or field.default) for field in members]
            with self.options:
                self.controls.draw_card(f"Options of {backend}", members)
        self.controls.show_problems(self.controls.problems)
        if self._was_shown:
            await self.shown()

    async def shown(self) -> None:
        """Check a local target as soon as the step is opened; others may need the network."""
        self._was_shown = True
        await self.update_options()
        if self.target == registry.DEFAULT and not list(self.findings):
            await self.check()

    async def check(self) -> None:
        """Run doctor, and show every finding as it comes."""
        from nicegui import ui

        self._request_number += 1
        request_number, target = self._request_number, self.target
        self.findings.clear()
        self.button.set_enabled(False)
        self.status_label.set_text("Looking…")
        findings = doctor.findings(target, _option_values(self.draft, target))
        problem_count = 0
        try:
            while (finding := await asyncio.to_thread(_next, findings)) is not None:
                if request_number != self._request_number:
                    return
                problem_count += finding.ok is False
                mark, color = _MARKS[finding.ok]
                with self.findings, ui.element("li"):
                    ui.label(mark).classes(f"ct-state {color}")
                    with ui.element("div"):
                        ui.label(finding.what).classes("ct-found-what")
                        hint = f" ({finding.hint})" if finding.hint else ""
                        ui.label(text.clean(f"{finding.message}{hint}")).classes("ct-dim ct-small")
        except CloudtrainError as error:
            problem_count += 1
            with self.findings, ui.element("li"):
                ui.label("problem").classes("ct-state ct-bad")
                ui.label(shell.format_error(error))
        if request_number == self._request_number:
            summary = f"{problem_count} problem{'s' * (problem_count != 1)}"
            self.status_label.set_text(summary if problem_count else "All checks passed.")
            self.button.set_enabled(True)

    def _configured(self, field: fields.Field) -> str:
        """Return the option's value in cloudtrain.toml, which applies where the job sets none."""
        from cloudtrain.job import targets

        try:
            named = targets.named_targets(self.draft.form.folder).get(self.target)
        except CloudtrainError:
            return ""
        value = named.options.value.get(field.path[-1]) if named else None
        return f"{value} (cloudtrain.toml)" if value is not None else ""


def _next(findings: Iterator[Finding]) -> Finding | None:
    return next(findings, None)


def _by_group(members: list[fields.Field]) -> Iterator[list[fields.Field]]:
    from itertools import groupby

    for _, group in groupby(members, key=lambda field: field.group):
        yield list(group)


def _option_values(draft: Draft, target: str) -> dict[str, Any]:
    """Return the options of the form for a target's backend, as plain values."""
    try:
        backend = fields.backends_by_target(draft.form.folder).get(target, target)
        document, _ = draft.form.document()
    except CloudtrainError:
        return {}
    options = (document.value.get("options") or {}).get(backend)
    return dict(options) if isinstance(options, dict) else {}
