"""Initial values of a model's tensors by name: drawn, or read from safetensors; a rank takes its own part of each.

A model is built without values (`Recorder`): its parameters are on the meta device, and what would have initialised each
of them is recorded. `Weights.fill` runs that again for one tensor at a time, with a seed made of the tensor's name, so
that every layout gets the same values, and keeps the part that this rank holds.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALL = 1 << 16  # numbers of a parameter whose value in the constructor is kept
Part = tuple[slice, ...]
Operation = tuple[Any, tuple[Any, ...], dict[str, Any]]  # of torch, its arguments after the tensor


class Recorder(TorchDispatchMode):
    """While active, new parameters have no memory, and the operations that set them are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: dict[int, list[tuple[tuple[Operation, ...], Operation]]] = {}  # by parameter: (views, operation)
        self._roots: dict[int, tuple[int, tuple[Operation, ...]]] = {}  # of a view: its parameter and how it is made
        self._alive: list[torch.Tensor] = []  # an id means nothing once its tensor is gone
        self._unknown: set[int] = set()
        self._made: dict[int, Operation] = {}  # by the storage of a tensor on the meta device: what fills it alike

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.is_meta and (how := _made_by(func, args)) is not None:
            self._made[result.untyped_storage()._cdata] = how
            self._alive.append(result)
        found = self._roots.get(id(args[0])) if args and isinstance(args[0], torch.Tensor) else None
        if found is None or (alias := func._schema.arguments[0].alias_info) is None:
            return result
        (root, views), operation = found, (func, args[1:], kwargs)
        if alias.is_write:
            others = [each for each in tree_leaves((args[1:], kwargs)) if isinstance(each, torch.Tensor)]
            if any(each.is_meta for each in others):  # it depends on values that are not there
                self._unknown.add(root)
            self._steps[root].append((views, operation))
        elif isinstance(result, torch.Tensor):
            self._roots[id(result)] = root, (*views, operation)
            self._alive.append(result)
        return result

    @contextmanager
    def recording(self, on_meta: bool = False) -> Iterator[None]:
        """Build models without values.

        Args:
            on_meta: whether what is built has its parameters and buffers on the meta device already.
        """
        hooks = [register_module_parameter_registration_hook(self._watch if on_meta else self._emptied)]
        if on_meta:
            hooks.append(register_module_buffer_registration_hook(self._watch))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _emptied(self, module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        """Return what takes the place of a parameter with values, None for one without."""
        if parameter.is_meta:
            return None
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        self._roots[id(empty)], self._steps[id(empty)] = (id(empty), ()), []
        self._alive.append(empty)
        if parameter.numel() <= SMALL:
            copy = (torch.ops.aten.copy_.default, (parameter.detach().clone(),), {})
            self._steps[id(empty)].append(((), copy))
        return empty

    def _watch(self, module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None and tensor.is_meta and id(tensor) not in self._roots:
            self._roots[id(tensor)] = (id(tensor), ())
            made = self._made.get(tensor.untyped_storage()._cdata)
            self._steps[id(tensor)] = [] if made is None else [((), made)]
            self._alive.append(tensor)

    def drawn(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None] | None:
        """Return what initialises a parameter, or None where that is not known."""
        steps = self._steps.get(id(parameter))
        if not steps or id(parameter) in self._unknown:
            return None

        def run(tensor: torch.Tensor) -> None:
            for views, (func, args, kwargs) in steps:
                target = tensor
                for view, more, options in views:
                    target = view(target, *more, **options)
                func(target, *args, **kwargs)

        return run


@dataclass
class Weights:
    """The values of a model that was built without them."""

    seed: int
    draws: dict[str, Callable[[torch.Tensor], None] | None]
    stored: dict[str, Callable[[], Any]] = field(default_factory=dict)  # to a slice of a safetensors file
    names: dict[str, str] = field(default_factory=dict)  # the first name of a parameter that has several

    def __deepcopy__(self, memo: dict[int, Any]) -> Weights:
        return self

    @classmethod
    def of(cls, model: nn.Module, recorder: Recorder, seed: int, stored: dict[int, Callable[[], Any]]) -> Weights:
        """Return the values of a model that a recorder has built; `stored` is by the id of the parameter."""
        made, first = cls(seed, {}), dict[int, str]()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            made.names[name] = own = first.setdefault(id(parameter), name)
            if id(parameter) in stored:
                made.stored[own] = stored[id(parameter)]
            else:
                made.draws[own] = recorder.drawn(parameter)
        return made

    @property
    def unknown(self) -> list[str]:
        """Names of tensors whose values are neither stored nor drawn by operations that could be recorded."""
        return [name for name, draw in self.draws.items() if draw is None]

    def part(self, name: str, like: torch.Tensor, part: Part) -> torch.Tensor:
        """Return a part of a tensor, of the dtype and the whole shape of another one, on the CPU."""
        name = self.names[name]
        if name in self.stored:
            read = self.stored[name]()
            return (read[part] if like.dim() else read[...]).to(like.dtype)  # type: ignore[no-any-return]
        whole, draw = torch.empty(like.shape, dtype=like.dtype), self.draws[name]
        assert draw is not None
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed_of(self.seed, name))
            draw(whole)
        return whole[part]

    def fill(self, model: nn.Module, device: torch.device, offload: bool = False) -> None:
        """Give the model's parameters memory, with the values that this rank holds, one after the other.

        Buffers are moved to the device, parameters are made there, or on the CPU where they are offloaded to it.
        Tied parameters stay tied.
        """
        names: dict[int, list[str]] = {}
        empty: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            if parameter.is_meta:
                empty[id(parameter)] = parameter
        home = torch.device("cpu") if offload else device
        model._apply(lambda tensor: torch.empty_like(tensor, device=home) if tensor.is_meta else tensor.to(device))
        for key, (first, *others) in names.items():
            made = model.get_parameter(first)
            for name in others:
                module, _, own = name.rpartition(".")
                model.get_submodule(module)._parameters[own] = made
            if key in empty:
                with torch.no_grad():
                    held = made.to_local() if isinstance(made, DTensor) else made
                    values = self.part(first, empty[key], part_of(made))
                    if values.shape != held.shape:
                        raise RuntimeError(f"{first}: this rank holds {tuple(held.shape)}, not {tuple(values.shape)}")
                    held.copy_(values)

    def each(
        self, model: nn.Module, dtype: torch.dtype | None, device: torch.device
    ) -> Iterator[tuple[nn.Parameter, Callable[[], torch.Tensor]]]:
        """Yield each parameter and what returns all its values, on the CPU; buffers are moved to the device.

        A parameter has its shape before, but no memory, and keeps its identity. Tied parameters stay tied.

        Args:
            model: the model that was built without values.
            dtype: of the values, None for the parameter's own.
            device: where the parameters and buffers are.
        """
        names: dict[int, list[str]] = {}
        empty: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            empty.setdefault(name, parameter)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        for same in names.values():
            like = empty[same[0]]
            kind = dtype if dtype is not None and like.is_floating_point() else like.dtype
            blank = torch.empty((), dtype=kind, device=device).expand(like.shape)
            made = nn.Parameter(blank, like.requires_grad)
            for name in same:
                module_name, _, own = name.rpartition(".")
                setattr(model.get_submodule(module_name), own, made)
            yield made, partial(self._whole, same[0], like, kind)

    def _whole(self, name: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        everything = tuple(slice(0, size) for size in like.shape)
        if self.names[name] in self.stored:  # from the files' dtype to the one that is kept, and no third one between
            like = like.to(dtype)
        values = self.part(name, like, everything).to(dtype)
        # A file is mapped for reading only.
        return values.clone() if self.names[name] in self.stored else values


def fill(model: nn.Module, device: torch.device, offload: bool = False) -> None:
    """Give a model that was built without values those that this rank holds; leave any other one alone."""
    if (weights := take(model)) is not None:
        weights.fill(model, device, offload)


def take(model: nn.Module) -> Weights | None:
    """Return the values of a model that was built without them, which it then no longer names; None for any other one."""
    return model.__dict__.pop("initial_weights", None)  # type: ignore[no-any-return]


def _made_by(func: Any, args: tuple[Any, ...]) -> Operation | None:
    """Return what gives an existing tensor the values of one that an operation has made, where that is known."""
    aten = torch.ops.aten
    if func in (aten.zeros.default, aten.ones.default):
        return aten.fill_.Scalar, (int(func is aten.ones.default),), {}
    if func is aten.full.default:
        return aten.fill_.Scalar, (args[1],), {}
    if func in (aten.randn.default, aten.rand.default):
        return (aten.normal_ if func is aten.randn.default else aten.uniform_).default, (), {}
    return None


def skeleton(model: Any) -> Any:
    """Return the same model without values."""
    empty = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad) for each in model.parameters()
    }
    return copy.deepcopy(model, empty)  # type: ignore[arg-type]


def seed_of(seed: int, name: str) -> int:
    """Return the seed of one tensor."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1


def part_of(tensor: torch.Tensor) -> Part:
    """Return which part of a whole tensor this rank holds."""
    begins, ends = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        place, mesh = tensor.device_mesh.get_coordinate(), tensor.device_mesh
        axes = list(enumerate(tensor.placements))
        # A strided axis was applied last, to the parts of the axes behind it.
        axes.sort(key=lambda item: isinstance(item[1], _StridedShard))
        for axis, placement in axes:
            if (dim := getattr(placement, "dim", None)) is None or place is None:
                continue
            begin, end = begins[dim], ends[dim]
            each = -(-(end - begin) // mesh.size(axis))  # as torch.chunk does it
            begins[dim] = min(begin + place[axis] * each, end)
            ends[dim] = min(begins[dim] + each, end)
    return tuple(slice(begin, end) for begin, end in zip(begins, ends, strict=True))
