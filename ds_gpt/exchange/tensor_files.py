"""safetensors files of any size, written and read one tensor at a time.

The library's own writer wants all tensors of a file at once. The format makes that needless: eight bytes with the
length of a JSON header, the header with each tensor's place, then their bytes one after the other
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.replacing import sync
from ds_gpt.exchange.layouts import Shape

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8  # bytes: where the tensors begin


def write_tensors(path: Path, shapes: Mapping[str, Shape], dtype: torch.dtype, tensors: Iterable[Tensor]) -> None:
    """Write one file and see it onto the disk; `tensors` come in the order of `shapes`, one by one."""
    places, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        places[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **places}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            assert tuple(tensor.shape) == shape and tensor.dtype == dtype, (
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}"
            )
            file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
    sync(path)


def write_sharded(
    folder: Path,
    shapes: Sequence[tuple[str, Shape]],
    dtype: torch.dtype,
    tensors: Iterator[Tensor],
    max_shard_bytes: int,
) -> None:
    """Write ``model.safetensors``; beyond `max_shard_bytes`, several files and the index of them."""
    shards: list[dict[str, Shape]] = [{}]
    filled, total = 0, 0
    for name, shape in shapes:
        size_bytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and filled + size_bytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled, total = filled + size_bytes, total + size_bytes
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS, shards[0], dtype, tensors)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / name, shard, dtype, (next(tensors) for _ in shard))
        weight_map |= dict.fromkeys(shard, name)
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    )
    sync(folder / INDEX)


class TensorFolder:
    """The tensors of a folder, in one file or in many; each is read when it is asked for, and none runs code.

    Raises:
        ConfigError: there are none, or they cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._files = ExitStack()
        self._at: dict[str, Any] = {}
        try:
            for path in _files_of(folder):
                file = self._files.enter_context(safe_open(path, framework="pt"))
                self._at |= dict.fromkeys(file.keys(), file)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._files.close()
            raise ConfigError(
                Problem(
                    f"the weights in '{folder}' cannot be read: {error}",
                    "a file is damaged or missing",
                    "copy the folder anew from where it was published",
                )
            ) from error

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._at)

    def shape(self, name: str) -> Shape:
        """Shape of a tensor, from the header alone."""
        return tuple(self._at[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Type of a tensor's elements, as the format names it (``F32``)."""
        return self._at[name].get_slice(name).get_dtype()

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self._at[name].get_tensor(name)


def _files_of(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():  # before the index, should both be there: so transformers reads a folder
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{INDEX} names a file of another folder: {outside[0]!r}")
        return [folder / name for name in names]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickles:
        raise ConfigError(
            Problem(
                f"'{folder}' has its weights in {', '.join(pickles[:4])}, which are pickles",
                "reading a pickle runs whatever code is in it, so that of a stranger is never read",
                "take its .safetensors files; or, if you trust it, load it in transformers and save_pretrained it",
            )
        )
    raise ConfigError(
        Problem(
            f"'{folder}' has no {WEIGHTS} and no {INDEX}",
            "there are no weights to read",
            "give the folder of a model as transformers saves it",
        )
    )


def parse_bytes(text: str) -> int:
    """``5GB``, ``200MB``, ``64KB`` in bytes (powers of ten, as transformers counts). Raises ValueError."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    number, unit = text[:-2].strip(), text[-2:].upper()
    if unit not in units or not number.replace(".", "", 1).isdigit() or float(number) <= 0:
        raise ValueError(f"{text!r} is not a size such as 5GB, 200MB or 64KB")
    return int(float(number) * units[unit])
