"""The results of a run: its checkpoints, and the files to download."""

from __future__ import annotations

from cloudtrain.console import artifacts, history, shell, text, widgets
from cloudtrain.errors import CloudtrainError
from cloudtrain.job.units import format_size
from cloudtrain.runs.run import Run

MAX_ROWS = 200  # of each list


class Results:
    """The results on one page."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._drawn: object = None

    async def show(self) -> None:
        """Draw the results."""
        with widgets.card("Checkpoints and artifacts") as self._card:
            pass
        await self.refresh()

    async def refresh(self) -> None:
        """Redraw the results when they have changed."""
        from nicegui import ui

        rows, files, elsewhere, missing = await history.current().query_run(self._run_id, _read_results)
        if (rows, files, missing) == self._drawn:
            return
        self._drawn = (rows, files, missing)
        self._card.clear()
        with self._card:
            shell.heading("Checkpoints and artifacts", 2)
            if rows:
                widgets.table(
                    ("step", "attempt", "when", "size"), rows, caption="Checkpoints",
                    looks={"step": "ct-number", "attempt": "ct-number", "size": "ct-number"},
                )  # fmt: skip
            if missing:
                ui.label(text.clean(missing, 2000)).classes("ct-callout ct-callout-bad")
            else:
                self._files(files)
            if elsewhere:
                with ui.element("div").classes("ct-row"):
                    widgets.button("Copy to this machine", self._fetch, icon="download")

    def _files(self, files: list[artifacts.Artifact]) -> None:
        from nicegui import ui

        if not files:
            ui.label("The run has no files here.").classes("ct-dim")
            return
        with widgets.collapsible(f"{len(files)} file{'s' * (len(files) != 1)}", opened=len(files) <= 12):
            cells = [(_link(self._run_id, file.path), format_size(file.size_bytes)) for file in files[:MAX_ROWS]]
            widgets.table(("file", "size"), cells, caption="Files", looks={"size": "ct-number"})
            if len(files) > MAX_ROWS:
                ui.label(f"and {len(files) - MAX_ROWS} more: cloudtrain fetch {self._run_id}").classes("ct-dim")

    async def _fetch(self) -> None:
        from nicegui import ui

        ui.notify("fetching")
        try:
            await history.current().query_run(self._run_id, lambda run: run.fetch(artifacts.results_folder(run)))
        except CloudtrainError as error:
            shell.notify_error(error)
        await self.refresh()


def _read_results(run: Run) -> tuple[list[tuple[str, ...]], list[artifacts.Artifact], bool, str]:
    events = [event for event in run.store.events(run.run_id, "checkpoint") if isinstance(event.data.get("step"), int)]
    rows: list[tuple[str, ...]] = [
        (
            str(event.data["step"]),
            event.attempt.rpartition("-a")[2],
            text.format_time(event.at),
            format_size(event.data["size_bytes"]) if isinstance(event.data.get("size_bytes"), int) else "",
        )
        for event in events
        if event.node == 0
    ]
    elsewhere = (
        run.store.home / artifacts.FETCHED in artifacts.results_folder(run).parents and run.record.status.state.final
    )
    missing = artifacts.describe_missing_folder(run)
    return rows[-MAX_ROWS:][::-1], artifacts.list_artifacts(run), elsewhere, missing


def _link(run_id: str, path: str) -> object:
    from nicegui import ui

    def draw() -> None:
        if address := artifacts.download_url(run_id, path):
            ui.link(text.clean(path), address).props("download")
        else:
            ui.label(text.clean(path.encode("utf-8", "replace").decode()))

    return draw
