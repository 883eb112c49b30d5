"""Submit calls of a function, and get its values: `python examples/function/train.py [TARGET]`."""

import sys

import cloudtrain


@cloudtrain.function(target=sys.argv[1] if sys.argv[1:] else "local")
def train(lr, steps=20):
    import cloudtrain_runtime as runtime

    weight = 0.0
    for step in range(1, steps + 1):
        weight -= lr * (weight - 3.0)
        runtime.log_metrics(step=step, loss=(weight - 3.0) ** 2)
    return {"lr": lr, "rank": runtime.context().rank, "weight": round(weight, 3)}


if __name__ == "__main__":
    run = cloudtrain.function(train, processes_per_node=2).submit(lr=0.3)
    print("ranks:", run.results())
    group = train.map([0.01, 0.1, 0.3], max_parallel=2)
    best = max(group.results(), key=lambda value: value["weight"])
    print("best:", best["lr"])
