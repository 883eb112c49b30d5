"""Write safetensors files one tensor after the other: never more than one of them has to be in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from .pretrained import INDEX, WEIGHTS

FILE_BYTES = 5_000_000_000  # of one file at most, unless a single tensor is larger
# As the format names them: https://github.com/huggingface/safetensors, 2026-11
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class TensorFormat:
    """What stands in a file's header about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def deal(formats: dict[str, TensorFormat], file_bytes: int = FILE_BYTES) -> list[list[str]]:
    """Return the names of the tensors of each file, in their order."""
    files: list[list[str]] = [[]]
    room = file_bytes
    for name, each in formats.items():
        if files[-1] and each.size_bytes > room:
            files.append([])
            room = file_bytes
        files[-1].append(name)
        room -= each.size_bytes
    return files


def write(
    folder: Path,
    formats: dict[str, TensorFormat],
    tensors: Iterable[tuple[str, torch.Tensor]],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write tensors on the CPU, which come in the order of `formats`, with an index where they take several files."""
    files, source = deal(formats, file_bytes), iter(tensors)
    names = [WEIGHTS]
    if len(files) > 1:
        names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for file, held in zip(names, files, strict=True):
        with open(folder / file, "wb") as out:
            out.write(_header({name: formats[name] for name in held}))
            for expected in held:
                name, tensor = next(source)
                if (name, TensorFormat(tuple(tensor.shape), tensor.dtype)) != (expected, formats[expected]):
                    raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, the header has {expected}")
                out.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                del tensor  # before the next one is there
    if len(files) > 1:
        places = {name: file for file, held in zip(names, files, strict=True) for name in held}
        total = sum(each.size_bytes for each in formats.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


def _header(formats: dict[str, TensorFormat]) -> bytes:
    rows: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, each in formats.items():
        begin, end = end, end + each.size_bytes
        rows[name] = {"dtype": DTYPES[each.dtype], "shape": list(each.shape), "data_offsets": [begin, end]}
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
