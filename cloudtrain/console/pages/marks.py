"""What a person writes to a run, on its page: title, tags, note, star, archived."""

from __future__ import annotations

from typing import Any

from cloudtrain.console import history, shell, text, widgets
from cloudtrain.errors import CloudtrainError
from cloudtrain.history import marks


class Headline:
    """The heading of a run's page: its title or short name, its id, and what a person wrote to it."""

    def __init__(self, run_id: str, short: str) -> None:
        from nicegui import ui

        self._run_id, self._short = run_id, short
        self._heading = shell.heading(short)
        ui.label(run_id).classes("ct-dim ct-small")

    def show_marks(self) -> None:
        """Draw the line of the star, the tags and the note here."""
        from nicegui import ui

        self._area = ui.element("div").classes("ct-row")

    def draw(self, stored: marks.Marks) -> None:
        """Draw the title or the short name, with a star where the run has one; the tags and the note."""
        from nicegui import ui

        self._area.clear()
        name = text.clean(stored.title, 200) or self._short
        self._heading.text = ("★ " if stored.starred else "") + name
        ui.page_title(f"{name} · cloudtrain")
        with self._area:
            if stored.title:
                ui.label(self._short).classes("ct-dim")
            for tag in stored.tags:
                ui.label(text.clean(tag, 60)).classes("ct-tag")
            if stored.note:
                ui.label(text.clean(stored.note, 300)).classes("ct-dim")
        self._area.set_visibility(bool(stored.title or stored.tags or stored.note))


async def show(run_id: str, headline: Headline) -> None:
    """Draw the fields; a change is stored with Save, the star and the archive at once."""
    from nicegui import ui

    stored = await history.current().query_run(run_id, lambda run: marks.read(run.store, run.run_id))
    shown = [stored]
    headline.draw(stored)

    async def change(**changes: Any) -> None:
        try:
            shown[0] = await history.current().query_run(run_id, lambda run: run.mark(**changes))
        except CloudtrainError as error:
            shell.notify_error(error)
        else:
            headline.draw(shown[0])
            ui.notify("saved")

    async def save() -> None:
        tags = list(dict.fromkeys(each.strip() for each in (tags_field.value or "").split(",") if each.strip()))
        removed = [each for each in shown[0].tags if each not in tags]
        await change(title=title.value or "", note=note.value or "", tag=tags, untag=removed)

    with widgets.card("Notes"), ui.element("div").classes("ct-stack"):
        with ui.element("div").classes("ct-row"):
            title = ui.input(label="Title", value=stored.title).props("outlined dense").classes("ct-grow")
            tags_field = ui.input(label="Tags, separated by commas", value=", ".join(stored.tags))
            tags_field.props("outlined dense").classes("ct-grow")
            ui.checkbox("Star", value=stored.starred, on_change=lambda e: change(star=e.value))
            ui.checkbox("Archived", value=stored.archived, on_change=lambda e: change(archive=e.value))
        note = ui.textarea(label="Note", value=stored.note).props("outlined dense autogrow rows=1").classes("ct-note")
        with ui.element("div"):
            widgets.button("Save", save)
