"""Decides at which step a metric stands: what its line says, the progress bar beside it, its epoch, else a count."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cloudtrain.events import STEPS, is_evaluation
from cloudtrain.metrics.bars import Bar
from cloudtrain.metrics.lines import Position


class Steps:
    """The steps of one rank in one attempt.

    Args:
        seen: Last step of each metric that this attempt has stored already.
        earlier: Last step of each metric of the attempts before; a count continues behind it.
        per_epoch: Steps in an epoch as the attempts before counted them; a count continues at its epoch where that is known.
        first_epoch: The first epoch of the run that is stored, None where none is.
    """

    def __init__(
        self,
        seen: Mapping[str, int],
        earlier: Mapping[str, int],
        per_epoch: Mapping[str, float],
        first_epoch: float | None = None,
    ) -> None:
        self._seen, self._earlier, self._per_epoch = dict(seen), earlier, per_epoch
        self._first_epoch = first_epoch
        self._last: int | None = None  # the newest step that the script has named
        self._training = max((step for name, step in seen.items() if not is_evaluation(name)), default=None)
        self._counts = False  # lines named neither step nor epoch
        self._bars: dict[
            str, tuple[int, int, int]
        ] = {}  # by metric: done and size of its newest bar, steps before that bar
        self._bar: tuple[int, int, int] | None = None  # the same of the bar that cannot be combined with other lines
        self._title, self._is_slow = "", False
        self._tied = False  # a line without a step took that bar's
        self._local: tuple[float, int, bool | None] | None = (
            None  # epoch, step in it, whether steps begin again with it
        )
        self.epoch: float | None = None  # of the newest heading of Keras
        self.heading: float | None = None  # of the newest line that named an epoch and nothing else

    def explicit(self, name: str, step: int) -> int:
        """Return the step that a metric's own line names, and remember it."""
        self._seen[name] = self._last = step
        return step

    def implicit(self, name: str, epoch: float | None, *, same: bool = False) -> int:
        """Return the step of a metric whose line names none; `same` where several of its points may have one step."""
        before = self._seen.get(name)
        evaluation = is_evaluation(name)
        step = self.beside
        if step is not None:
            self._tied = self._uses_bar
        elif evaluation and self._training is not None:
            step, same = self._training, True
        elif before is None and epoch is not None and (pace := self._per_epoch.get(name)):
            self._counts = pace != 1
            step = max(round(epoch * pace), 1)
        elif epoch is not None and epoch == int(epoch) and not self._counts:
            step = int(epoch)
        else:
            self._counts = True
            step = (self._earlier.get(name, 0) if before is None else before) + 1
        if before is not None and (step < before or (step == before and not same)):
            step = before + 1
        self._seen[name] = step
        if not evaluation:
            self._training = step
        return step

    @property
    def beside(self) -> int | None:
        """The step of the progress bar or of the last line that named one."""
        if self._bar is not None and self._uses_bar:
            return self._bar[0] + self._bar[2]
        return self._last

    @property
    def is_behind(self) -> bool:
        """Whether the bar beside may be behind: tqdm draws a fast one ten times a second, and again behind a line."""
        return self._uses_bar and not self._is_slow

    @property
    def _uses_bar(self) -> bool:
        """Whether there is a bar, and it is the training's: one with another title that is full has prepared something."""
        if self._bar is None or self._tied:
            return self._tied
        prepared = self._bar[0] >= self._bar[1] and _WORD.search(self._title) and not _TRAINING.search(self._title)
        return self._last is None and not prepared

    def name_place(self, step: int | None, epoch: float | None) -> None:
        """Remember a step, or an epoch, that stands alone in its line."""
        if step is None:
            self.heading = epoch
        else:
            self._last = step

    def globalize(self, position: Position) -> int | None:
        """Return the step over all epochs of a line that names one; None where it names none."""
        step, size, epoch = position.step, position.size, position.epoch
        if step is None or step >= STEPS:
            return None
        if position.local is False or epoch is None:
            return step
        epoch = self._since_first(epoch)
        known = self._local
        local = known[2] if known else None
        if known and epoch > known[0]:
            local = step <= known[1] if local is None else local
        elif known is None and epoch > 0:  # resumed: whichever is nearer to where the attempt before ended
            ends = max(self._earlier.values(), default=None)
            local = True if ends is None else abs(epoch * size + step - ends) <= abs(step - ends)
        before = 0.0
        if local and size:
            before = epoch * size
        elif local and known:  # no size: the steps of the epochs before are those that were seen
            before = (
                max((value for value in (self._last,) if value is not None), default=0) + 1
                if step < known[1]
                else ((self._last or 0) - known[1])
            )
        self._local = (epoch, step, local)
        return int(before) + step

    def show_bar(self, bar: Bar) -> int:
        """Remember a bar that cannot be combined with other lines, and return its step over all epochs."""
        current = self._bar
        if current is not None and current[1] != bar.size:
            replaced = current[0] >= current[1] or (bar.size > current[1] and any(map(str.isalpha, self._title)))
            if self._tied or not replaced:
                return bar.done
            current = None
        if current is None:
            self._title = bar.title
        self._is_slow = bar.is_slow
        self._bar = _continued(current, bar.done, bar.size, 0)
        return self._bar[0] + self._bar[2]

    def is_beside(self, size: int) -> bool:
        """Return whether a bar of this size is the one that cannot be combined with other lines."""
        return self._bar is not None and self._bar[1] == size

    def in_bar(self, name: str, done: int, size: int, epoch: float | None) -> int | None:
        """Return the step of a metric in a bar; None where the bar is only drawn again.

        The bar of the next epoch continues from the last one.
        """
        current = self._bars.get(name)
        if current and current[0] == done and current[1] == size:
            return None
        before = 0
        if current is None:  # an epoch that was interrupted is done again
            ends = self._seen.get(name, self._earlier.get(name, 0))
            before = ends if not size else ends // size * size if ends > size else 0
        if epoch is not None and size and epoch == int(epoch):
            self._bars[name] = (done, size, int(self._since_first(epoch)) * size)
        else:
            self._bars[name] = _continued(current, done, size, before)
        done, _, before = self._bars[name]
        self._seen[name] = self._last = before + done
        return before + done

    def _since_first(self, epoch: float) -> float:
        """Return an epoch counted from 0, whichever the script's first one is."""
        if self._first_epoch is None:
            self._first_epoch = min(epoch, 1.0)
        return max(epoch - min(self._first_epoch // 1, 1.0), 0.0)


def _continued(current: tuple[int, int, int] | None, done: int, size: int, before: int) -> tuple[int, int, int]:
    """Return a bar's state after it was drawn: one that is behind the last drawing is the next epoch's."""
    if current is None:
        return done, size, before
    at, last_size, before = current
    return done, size, before + (max(last_size, at) if done < at else 0)


EPOCH_TITLE = re.compile(r"(?i)\bepoch\s*+[:=#]?\s*+\[?(\d{1,9})\b")
_WORD = re.compile(r"[A-Za-z]{2}")
_TRAINING = re.compile(r"(?i)epoch|steps?\b|iter|training")
