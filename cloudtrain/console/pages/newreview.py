"""The step Review of a new job: the job file, the plan, the problems; save or submit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from urllib.parse import quote

from cloudtrain.cli.view import planned
from cloudtrain.console import fields, shell, text, widgets
from cloudtrain.console.controls import format_problem
from cloudtrain.console.draft import Draft, Review, resolve_below
from cloudtrain.console.fields import Step
from cloudtrain.console.pages import newsweep
from cloudtrain.errors import CloudtrainError, Problem

LONGEST = 200_000  # characters of a request that a page shows


class ReviewStep:
    """The step of one draft. `go` opens another step; `submitted` is called when there is a run."""

    def __init__(
        self,
        draft: Draft,
        go: Callable[[Step], None],
        get_problems: Callable[[], Sequence[Problem]],
        submitted: Callable[[], None],
    ) -> None:
        self.draft = draft
        self.go = go
        self.get_problems = get_problems
        self.submitted = submitted
        self.review: Review | None = None
        self._request_number = 0

    def draw(self) -> None:
        """Draw the step."""
        from nicegui import ui

        self.status_label = ui.label("").classes("ct-dim").props('role="status"')
        self.problems_area = ui.element("div").classes("ct-stack")
        with ui.element("div").classes("ct-two ct-even"):
            with ui.element("section").classes("ct-card"):
                shell.heading("Job file", 2)
                self.text = ui.element("div")
                with ui.element("div").classes("ct-row ct-save"):
                    self.name = ui.input("File", value=self.draft.name).classes("ct-grow")
                    self.name.props("outlined dense stack-label hide-bottom-space spellcheck=false data-field=file")
                    self.name.props["hint"] = text.clean(f"below {self.draft.root}")
                    ui.button("Save job file", on_click=self._save, color=None).classes("ct-plain").props("no-caps")
                self.saved = ui.label("").classes("ct-small").props('role="status"')
            with ui.element("section").classes("ct-card"):
                shell.heading("Plan", 2)
                self.plan = ui.element("div")
        self.sweep = newsweep.NewSweep(self.draft, self.submitted)
        self.sweep.draw()
        with ui.element("div").classes("ct-row ct-turn"):
            back = ui.button("Back", on_click=lambda: self.go(Step.SOURCE), color=None)
            back.classes("ct-plain").props("no-caps")
            self.button = ui.button("Submit", on_click=self._submit, color=None).classes("ct-first")
            self.button.props("no-caps icon=send data-submit")
            self.button.set_enabled(False)

    async def shown(self) -> None:
        """Package the source and show what would be submitted."""
        self._request_number += 1
        request_number, draft = self._request_number, self.draft.snapshot()
        self.button.set_enabled(False)
        self.review = None
        self.status_label.set_text("Making the plan…")
        review = await asyncio.to_thread(draft.review)
        if request_number != self._request_number:
            return
        self.review = review
        self.sweep.fill()
        self._show(review)

    def _show(self, review: Review) -> None:
        from nicegui import ui

        count = len(review.problems)
        self.status_label.set_text(f"{count} problem{'s' * (count != 1)} to fix before it can be submitted." if count else
                           "This request will be sent.")  # fmt: skip
        self.button.set_enabled(review.plan is not None)
        for part in (self.problems_area, self.text, self.plan):
            part.clear()
        with self.problems_area:
            if count:
                self._problems(review.problems)
            if self.draft.parent:
                self._changes()
        with self.text:
            ui.label(_clean_lines(review.text)).classes("ct-pre").props(
                'tabindex=0 role="region" aria-label="Job file"'
            )
        with self.plan:
            if review.plan is None:
                ui.label("Fix the problems to see the plan.").classes("ct-dim")
            else:
                self._plan(review)

    def _plan(self, review: Review) -> None:
        from nicegui import ui

        plan = review.plan
        assert plan is not None
        rows = [
            ("run", plan.run_id),
            ("place", planned.describe_target(plan)),
            ("world", planned.describe_nodes(plan)),
            ("limit", planned.describe_limit(plan)),
            *(("runs", each) for each in planned.describe_commands(plan)),
            ("source", planned.describe_source(plan)),
            *(("note", note) for note in plan.notes),
        ]
        with ui.element("dl").classes("ct-pairs"):
            for name, value in rows:
                with ui.element("dt"):
                    ui.label(name)
                with ui.element("dd"):
                    ui.label(text.clean(value))
        shell.heading("Request", 3)
        request_text = text.format_json(planned.shorten(plan.request)[0])
        visible_text = request_text if len(request_text) <= LONGEST else request_text[:LONGEST] + "\n…"
        ui.label(visible_text).classes("ct-pre").props('tabindex=0 role="region" aria-label="Request"')

    def _problems(self, problems: Sequence[Problem]) -> None:
        from nicegui import ui

        with ui.element("section").classes("ct-card ct-verdict"):
            shell.heading("Problems", 2)
            with ui.element("ul").classes("ct-findings"):
                for problem in problems:
                    step = fields.locate(problem.path)[0]
                    with ui.element("li"):
                        ui.label(format_problem(problem)).classes("ct-grow")
                        if step is not Step.REVIEW:
                            step_button = ui.button(step, on_click=lambda step=step: self.go(step), color=None)
                            step_button.props("flat dense no-caps")

    def _changes(self) -> None:
        from nicegui import ui

        changes = self.draft.changes()
        with ui.element("section").classes("ct-card"):
            shell.heading("What differs", 2)
            if not changes:
                ui.label("Nothing differs from the run before: this submits the same job again.").classes("ct-dim")
                return
            with ui.element("div").classes("ct-scroll"), ui.element("table").classes("ct-table"):
                with ui.element("thead"), ui.element("tr"):
                    for head in ("Value", "Parent", "This run"):
                        with ui.element("th"):
                            ui.label(head)
                with ui.element("tbody"):
                    for row in changes:
                        with ui.element("tr"):
                            for cell in row:
                                with ui.element("td").classes("ct-mono"):
                                    ui.label(text.clean(cell) or "left out")

    # -- submit and save ----------------------------------------------------------------------------------------------

    async def _submit(self) -> None:
        from nicegui import ui

        review = self.review
        if review is None or review.plan is None:
            return
        self.button.props("loading")
        self.button.set_enabled(False)
        self.status_label.set_text("Submitting…")
        try:
            run_id = await asyncio.to_thread(lambda: self.draft.submit(review).run_id)
        except CloudtrainError as error:
            self.status_label.set_text("It was not submitted.")
            shell.notify_error(error)
            self.button.props(remove="loading")
            self.button.set_enabled(True)
            return
        self.submitted()
        ui.navigate.to(f"/runs/{quote(run_id)}")

    async def _save(self) -> None:
        name = str(self.name.value or "")
        try:
            exists = await asyncio.to_thread(lambda: resolve_below(self.draft.root, name).is_file())
            question = f"{text.clean(name)} already exists. Overwrite it?"
            if exists and not await widgets.confirm("Overwrite the file", [question], "Overwrite it", "Leave it"):
                return
            path = await asyncio.to_thread(lambda: self.draft.save(name, overwrite=exists))
        except CloudtrainError as error:
            self.saved.set_text("")
            shell.notify_error(error)
            return
        self.saved.set_text(f"Written to {text.clean(str(path))}.")
        self.name.set_value(self.draft.name)


def _clean_lines(content: str) -> str:
    return "\n".join(text.clean(line, 10_000) for line in content.split("\n"))
