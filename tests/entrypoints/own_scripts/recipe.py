"""Runs somebody's script of the Trainer as it is, with our checkpoints; it is killed after a step on request.

recipe.py SCRIPT ARGUMENTS...
"""

import json
import os
import runpy
import signal
import sys
import time

import cloudtrain_trainer

cloudtrain_trainer.serve_all()  # as with checkpoint.engine: cloudtrain
from transformers import TrainerCallback, trainer  # noqa: E402

WAIT_S = 120
KILL_AFTER = int(os.environ.get("KILL_AFTER", 0))


class Watch(TrainerCallback):
    """Writes each step's loss, and what the weights are at the end."""

    def on_train_begin(self, args, state, control, **kwargs):
        state.logging_steps = 1

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == KILL_AFTER:
            saved = os.path.join(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], f"checkpoint-{KILL_AFTER - 1}")
            for _ in range(WAIT_S * 20):
                if os.path.isdir(saved):
                    break
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if args.process_index == 0:
            losses = {row["step"]: row["loss"] for row in state.log_history if "loss" in row}
            weights = {name: value.detach().double().sum().item() for name, value in model.named_parameters()}
            with open(os.path.join(os.environ["CLOUDTRAIN_OUTPUT_DIR"], "result.json"), "w") as file:
                json.dump({"losses": losses, "weights": weights, "steps": state.global_step}, file)


trainer.DEFAULT_CALLBACKS.append(Watch)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
