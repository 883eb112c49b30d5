"""Run tasks of lm-evaluation-harness (the package lm-eval) on a trained model, in this process."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

from .errors import Unsupported
from .saved import Saved


def run_tasks(saved: Saved, names: list[str], include_path: str, limit: int, batch_size: int) -> dict[str, float]:
    """Return the results of tasks as `TASK/METRIC`; blocking. Raises Unsupported for tasks that cannot be run.

    Args:
        names: tasks or groups.
        include_path: folder with YAML files of tasks, "" for those of the package alone.
        limit: the first so many documents of each task, -1 for all.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # a log has no use for bars
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise Unsupported(f"--tasks needs the package lm-eval ({error}): pip install lm-eval") from None
    if saved.classifies:
        raise Unsupported("--tasks needs a language model, this one is a classifier of texts")
    manager = TaskManager(include_path=include_path or None, include_defaults=False)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        manager = TaskManager(include_path=include_path or None)
        if unknown := [name for name in unknown if name not in manager.all_tasks]:
            raise Unsupported(f"there is no task {', '.join(unknown)}: `lm-eval ls tasks` lists those of lm-eval")
    bare = (
        saved.model.get_base_model() if hasattr(saved.model, "get_base_model") else saved.model
    )  # the adapter is in it
    model: Any = HFLM(
        pretrained=bare,
        tokenizer=saved.tokenizer,
        batch_size=batch_size,
        device=str(next(saved.model.parameters()).device),
    )
    try:
        found: Any = lm_eval.simple_evaluate(
            model=model,
            tasks=list(names),
            task_manager=manager,
            limit=None if limit < 0 else limit,
            bootstrap_iters=0,
            log_samples=False,
        )
    except (OSError, ConnectionError) as error:  # a data set that is neither here nor can be loaded
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Unsupported(f"the data of {', '.join(names)} cannot be loaded: {first}") from None
    saved.model.eval()
    return flatten(found["results"])


def flatten(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the numbers of lm-eval's results by name: `TASK/acc`, with a filter `TASK/exact_match_strict-match`."""
    flat = {}
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if comma and number:
                flat[f"{task}/{metric}" + ("" if filtered == "none" else f"_{filtered}")] = float(value)
    return flat
