"""One call, and one that fails: `python examples/function/add.py [TARGET]`."""

import sys

import cloudtrain


@cloudtrain.function(target=sys.argv[1] if sys.argv[1:] else "local")
def divide(a, b):
    return a / b


if __name__ == "__main__":
    run = divide.submit(5, b=2)
    failing = divide.submit(5, b=0)
    print("value:", run.result())
    print("error:", repr(failing.exception().__cause__))
