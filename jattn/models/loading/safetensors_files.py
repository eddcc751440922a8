"""Tensors in safetensors files: what the headers say, and the bytes, mapped and never copied on the host."""

import dataclasses
import json
import math
import mmap
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn.models.loading.files import existing, read_json
from pallas_kernels.checks import require

# Of tensors that are read; others may stand in a file and be passed over.
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "BF16": jnp.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": jnp.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": jnp.dtype(jnp.float8_e5m2),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
FLOATS = ("F32", "BF16", "F16")  # what parameters, and scales of those in few bits, may be
_POINTER = b"version https://git-lfs"
_PIECE = 1 << 24  # bytes that are compared at once
_LENGTH = 8  # bytes of the header's length, which a file begins with


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: In the file.
        code: The file's word for its dtype, such as "BF16".
        shape: Of the tensor.
        memory: The file, mapped.
        start: Of the tensor's bytes in it.
        stop: Of the tensor's bytes in it.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    memory: mmap.mmap
    start: int
    stop: int

    @property
    def sources(self) -> tuple["StoredTensor", ...]:
        """The tensors that it is made of: itself."""
        return (self,)

    @property
    def widen(self) -> None:
        """How those become it: they are it."""
        return None

    def view(self) -> np.ndarray:
        """The tensor, read-only, in the file's own memory: it changes with the file."""
        dtype = DTYPES[self.code]
        count = (self.stop - self.start) // dtype.itemsize
        flat = np.frombuffer(self.memory, dtype, count, self.start)
        return flat.reshape(self.shape)

    def release(self, part: np.ndarray | None = None) -> None:
        """Gives the memory of its bytes back; who looks at them again has them read again.

        Args:
            part: A view of `view()`: only what lies between its first and its last byte; None = all of it.
        """
        start, stop = self.start, self.stop
        if part is not None:
            (begin, _), (first, end) = (np.lib.array_utils.byte_bounds(x) for x in (self.view(), part))
            start, stop = start + first - begin, start + end - begin
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self.memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def is_same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are the same, bit by bit. The memory of their bytes is given back."""
    if (one.code, one.shape) != (other.code, other.shape):
        return False
    bytes_of_one, bytes_of_other = (tensor.view().reshape(-1).view(np.uint8) for tensor in (one, other))
    for first in range(0, bytes_of_one.size, _PIECE):
        a, b = (array[first : first + _PIECE] for array in (bytes_of_one, bytes_of_other))
        if not np.array_equal(a, b):
            return False
        one.release(a)
        other.release(b)
    return True


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name. Nothing but the header is read.

    Raises:
        ValueError: It is no whole safetensors file.
    """
    rule = "be a whole safetensors file"
    size = path.stat().st_size
    require(size > _LENGTH, str(path), rule, f"{size} bytes")
    with path.open("rb") as file:
        is_pointer = file.read(len(_POINTER)) == _POINTER
        require(not is_pointer, str(path), rule, "a pointer of Git LFS (git lfs pull fetches the file)")
        file.seek(0)
        length = int.from_bytes(file.read(_LENGTH), "little")
        require(length <= size - _LENGTH, str(path), rule, f"{size} bytes and a header of {length}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:  # of json or of the encoding
            raise ValueError(f"{path} must {rule}, got {error}.") from error
        require(isinstance(header, dict), str(path), rule, repr(header)[:60])
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    header.pop("__metadata__", None)
    begin = _LENGTH + length
    try:
        found = {name: _tensor(name, entry, memory, begin) for name, entry in header.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must {rule}, got {error!r} in its header.") from error
    for tensor in found.values():
        got = f"{tensor.name} {tensor.code} {tensor.shape} in bytes {tensor.start} to {tensor.stop} of {size}"
        require(_is_whole(tensor, begin, size), str(path), rule, got)
    return found


def _tensor(name: str, entry: Any, memory: mmap.mmap, begin: int) -> StoredTensor:
    code, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    is_one = (
        isinstance(code, str) and isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    )
    if not is_one:
        raise TypeError(f"{name}: {code!r} {shape!r}")
    return StoredTensor(name, code, tuple(shape), memory, begin + start, begin + stop)


def _is_whole(tensor: StoredTensor, begin: int, size: int) -> bool:
    if not begin <= tensor.start <= tensor.stop <= size:
        return False
    dtype = DTYPES.get(tensor.code)
    return dtype is None or math.prod(tensor.shape) * dtype.itemsize == tensor.stop - tensor.start


SCALES_FILE = "kv_scales.safetensors"  # a cache's static scales, where the model's own files have none
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
# Beginnings of files that may stand beside a model's: not its tensors, or those under other names.
_BESIDE = ("consolidated", "adapter_model", "kv_scales")
# What a folder may have instead, and the way out.
_INSTEAD = {
    "consolidated*.safetensors": "has Mistral's own names, which are not read here: take the *.safetensors "
    "of the same checkpoint that transformers reads",
    "adapter_model.*": "is an adapter, not a model: merge it into its model and save that",
    "pytorch_model*.bin": "is pickled, which is not read here: AutoModelForCausalLM.from_pretrained(folder)"
    ".save_pretrained(other_folder) of transformers makes safetensors of it",
    "*.pth": "is pickled, which is not read here: take the checkpoint in the form of Hugging Face",
    "*.gguf": "is llama.cpp's: take the checkpoint that it was made of",
    "*/*.safetensors": "is in a folder below: load that one if it has a config.json of its own",
}


def tensor_files(directory: pathlib.Path) -> tuple[list[pathlib.Path], Mapping[str, str]]:
    """The files, and in which of them a tensor is said to be, by names; nothing is said where no index is.

    model.safetensors; or those that the index names; or the shards that are numbered; or all.

    Raises:
        FileNotFoundError: There is none, or one that the index or the shards' numbers tell of is missing.
        ValueError: The index is broken.
    """
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists():
        return [single], {}
    if index.exists():
        return _indexed(index)
    found = [path for path in directory.glob("*.safetensors") if not path.name.startswith(_BESIDE)]
    shards = [path for path in found if path.name.startswith("model-") and _SHARD.fullmatch(path.name)]
    found = sorted(shards or found)
    _require_all_shards(found)
    if not found:
        raise FileNotFoundError(f"{single} does not exist{_instead(directory)}.")
    return found, {}


def _indexed(index: pathlib.Path) -> tuple[list[pathlib.Path], Mapping[str, str]]:
    places = read_json(index).get("weight_map") or {}
    are_names = isinstance(places, dict) and all(isinstance(name, str) for name in places.values())
    require(are_names and len(places) > 0, f"{index}'s weight_map", "map tensors to files", repr(places)[:60])
    names = sorted(set(places.values()))
    others = [name for name in names if not name.endswith(".safetensors")]
    require(not others, f"{index}'s weight_map", "map tensors to safetensors files", ", ".join(others[:3]))
    for name in names:
        existing(index.parent / name, f" ({_INDEX} names it)")
    return [index.parent / name for name in names], places


def _require_all_shards(paths: Sequence[pathlib.Path]) -> None:
    """Of shards that say how many they are, none may be missing."""
    for path in paths:
        shard = _SHARD.fullmatch(path.name)
        if shard is None:
            continue
        for number in range(1, int(shard[3]) + 1):
            name = f"{shard[1]}-{number:0{len(shard[2])}}-of-{shard[3]}.safetensors"
            existing(path.with_name(name), f" ({path.name} is one of {int(shard[3])})")


def _instead(directory: pathlib.Path) -> str:
    for pattern, what in _INSTEAD.items():
        for path in sorted(directory.glob(pattern))[:1]:
            return f"; {path.relative_to(directory)} {what}"
    return ""
