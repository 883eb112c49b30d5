"""A call that fails after a checkpoint, and resumes from it: `python examples/function/resume.py [TARGET]`."""

import sys
from pathlib import Path

import cloudtrain


@cloudtrain.function(target=sys.argv[1] if sys.argv[1:] else "local")
def count(steps):
    import cloudtrain_runtime as runtime

    newest = runtime.latest_checkpoint()
    first = int(Path(newest, "step").read_text()) + 1 if newest else 1
    for step in range(first, steps + 1):
        folder = Path(runtime.context().checkpoint_dir, f"checkpoint-{step}")
        folder.mkdir(parents=True)
        (folder / "step").write_text(str(step))
        runtime.complete_checkpoint(str(folder), step=step)
        if step == 3 and not newest:
            raise RuntimeError("out of luck")
    return f"steps {first} to {steps}"


if __name__ == "__main__":
    run = count.submit(steps=6)
    print("first attempt:", run.exception().__cause__)
    run.resume()
    print("second attempt:", run.result())
