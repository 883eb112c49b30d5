r"""Split a max_runtime that is more than a partition allows into slices: starts of one batch job, one after the other.

The launcher stops the ranks at the end of a slice; the batch script then puts its job back into the queue, until
max_runtime is used up over all starts. A start's time counts from the begin of its allocation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.slurm.partitions import Limits
from cloudtrain.job.units import duration_s, format_duration

SAVE_S = 300  # of Slurm's time limit after the end of a slice: the last checkpoint, its upload
UPLOAD_S = 120  # of that at least after limits.grace
LEAST_S = 300  # a partition that allows less training than that is no place for slices

_BEGINS = """\
used=0 # seconds of max_runtime
[ -s slices ] && read -r over used <slices
left=$(({max_runtime_s} - used)) slice_end=$((started + {slice_s})) slice_state=PREEMPTED
[ "$left" -gt {slice_s} ] || {{ slice_end=$((started + (left > 0 ? left : 1))) slice_state=TIMED_OUT; }}
export CLOUDTRAIN_SLICE="$slice_end $slice_state" # when the launcher stops the ranks, and what that is
"""
_ENDS = """\
now=$(date +%s)
if [ $slice_state = PREEMPTED ] && [ "$now" -ge "$slice_end" ]; then
  over=$((over + 1)) states=PREEMPTED next=slice-$((over + 1))-of-{count}
fi
printf '%s %s\\n' "$over" $((used + now - started)) >slices.half && mv slices.half slices
"""


@dataclass(frozen=True)
class Slices:
    """The slices of one max_runtime: how many, how long each lasts, and what says so."""

    max_runtime_s: int
    slice_s: int
    margin_s: int
    why: str

    @classmethod
    def of(cls, manifest: Manifest, slice: str | None, limits: Limits) -> Slices | None:
        """Return the slices of an attempt, None where it needs none or can have none.

        Args:
            slice: the option of that name; it outweighs the partition.
            limits: what doctor saw of the partition.
        """
        margin_s = max(SAVE_S, manifest.grace_s + UPLOAD_S)
        if slice:
            slice_s, why = duration_s(slice), f"one slice is {slice} (options.slurm.slice)"
        elif limits.seconds is None or limits.seconds >= manifest.max_runtime_s + SAVE_S:
            return None
        else:
            slice_s = limits.seconds // 60 * 60 - margin_s
            why = f"partition {limits.name} allows {format_duration(limits.seconds)} (doctor, {limits.day})"
            if slice_s < LEAST_S:
                return None
        return cls(manifest.max_runtime_s, slice_s, margin_s, why) if slice_s < manifest.max_runtime_s else None

    @property
    def count(self) -> int:
        return -(-self.max_runtime_s // self.slice_s)

    @property
    def minutes(self) -> int:
        """Slurm's time limit of each start."""
        return -(-(self.slice_s + self.margin_s) // 60)

    def begins(self) -> str:
        """Return the lines of the batch script before the ranks run."""
        return _BEGINS.format(max_runtime_s=self.max_runtime_s, slice_s=self.slice_s)

    def ends(self) -> str:
        """Return the lines of the batch script after them, before it decides on another start."""
        return _ENDS.format(count=self.count)

    def notes(self, manifest: Manifest) -> Iterator[str]:
        """Yield what a plan says."""
        total, each = format_duration(self.max_runtime_s), format_duration(self.slice_s)
        yield (
            f"{self.why}: limits.max_runtime of {total} runs in {self.count} slices of at most {each}, with a wait in the "
            "queue before each"
        )
        yield (
            f"at the end of a slice ranks get SIGTERM and have {format_duration(manifest.grace_s)} (limits.grace) to save "
            "and exit; the next slice starts the script again: it resumes if it loads a checkpoint"
        )
