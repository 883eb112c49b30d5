"""Models that a task of the source builds on the meta device: each rank then draws or reads its part of every tensor.

The constructor runs a second time while what it does to its tensors is recorded (weights.py). transformers initialises no
model on the meta device: such a model is built again from its configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import pretrained
from .errors import Unsupported
from .weights import Recorder, Weights


def is_empty(model: nn.Module) -> bool:
    """Return whether a model has parameters without values."""
    return any(parameter.is_meta for parameter in model.parameters())


def outlined(model: Any, build: Callable[[], Any], seed: int, stored_in: str = "") -> nn.Module:
    """Return a model without values, of which `weights.fill` gives each rank its part.

    Args:
        model: the model, with all parameters on the meta device.
        build: returns such a model again.
        seed: of the values that are drawn.
        stored_in: folder or hub name of a model whose safetensors files have the values; "" draws all.

    Raises:
        Unsupported: it is not known how a tensor is initialised, or the files do not suit the model.
    """
    from transformers import PreTrainedModel

    recorder = Recorder()
    if isinstance(model, PreTrainedModel):
        names = list(model.state_dict())
        with recorder.recording():
            model = type(model)(model.config)
        if list(model.state_dict()) != names:
            raise Unsupported(
                "model() changes a model of transformers after it is built: build it outside torch.device('meta')"
            )
    else:
        with recorder.recording(on_meta=True):
            model = build()
        _set_buffers(model, recorder)
    stored = {}
    if stored_in:
        try:
            stored = pretrained.find(stored_in).match(model, mismatched=False)
        except pretrained.Whole as reason:
            raise Unsupported(f"weights(): {reason}: load the model in model() without torch.device('meta')") from None
    values = Weights.of(model, recorder, seed, stored)
    if values.unknown:
        raise Unsupported(
            f"model() builds on the meta device, and cloudtrain does not know how {values.unknown[0]} is initialised: "
            "set it in place in the constructor (torch.nn.init), or build the model without torch.device('meta')"
        )
    model.initial_weights = values  # type: ignore[assignment]
    return model  # type: ignore[no-any-return]


def _set_buffers(model: nn.Module, recorder: Recorder) -> None:
    """Give buffers on the meta device their values; raises Unsupported where they are not known."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if (draw := recorder.drawn(buffer)) is None:
                raise Unsupported(
                    f"the buffer {path}{'.' if path else ''}{name} is on the meta device and has no value: "
                    "build it with device='cpu'"
                )
            made = torch.empty_like(buffer, device="cpu")
            draw(made)
            module._buffers[name] = made
