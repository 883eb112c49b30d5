"""What the shared trainer refuses by its arguments and layout alone: a plan says it before anything is uploaded.

It imports no torch. Each sentence comes from the function that the training itself calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .arguments import Misuse, parse
from .errors import Unsupported
from .in_memory_arguments import parse_in_memory
from .strategies import mesh
from .strategies.compatibility import check_arguments


def problems(
    argv: Sequence[str], parallelism: Mapping[str, Any], world: int, nodes: int, in_memory: bool = False
) -> list[str]:
    """Return a sentence for each reason why a training with these arguments would not begin."""
    try:
        arguments = parse_in_memory(argv) if in_memory else parse(argv)
    except Misuse as error:
        return str(error).splitlines()
    return list(refusals(arguments, parallelism, world, nodes))


def refusals(arguments: Any, parallelism: Mapping[str, Any], world: int, nodes: int) -> Iterator[str]:
    """Yield a sentence for each reason why a training with these parsed arguments would not begin."""
    if parallelism.get("accelerate_config"):
        return  # only Accelerate reads its file
    try:
        plan = mesh.choose_plan(parallelism, world, nodes)
        check_arguments(arguments, plan, None)
        if not arguments.model:  # from scratch: the sizes are the arguments'
            heads = arguments.num_attention_heads
            own = arguments.num_key_value_heads
            mesh.check_division(
                plan.tensor, {"attention heads": heads, "key and value heads": own if own > 0 else heads}
            )
            mesh.check_layers(arguments.num_hidden_layers, plan.stages)
    except Unsupported as refusal:
        yield str(refusal)
