"""Safetensors files of a checkpoint: finding them, reading headers, and memory-mapped tensors."""

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

from jattn.models.loading.files import read_json, require_exists
from pallas_kernels.checks import require

# Dtypes that can be loaded; a file may have tensors of others, which are ignored unless the model needs them.
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
FLOATS = ("F32", "BF16", "F16")  # dtypes of parameters, and of the scales of quantized ones
_POINTER = b"version https://git-lfs"
_COMPARED_BYTES = 1 << 24  # number of bytes that are compared at a time
_LENGTH_BYTES = 8  # size of the header's length, which a file starts with


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        name: Name in the file.
        code: Dtype in safetensors' notation, such as "BF16".
        shape: Shape of the tensor.
        memory: The memory-mapped file.
        start: Offset of the tensor's first byte.
        stop: Offset after the tensor's last byte.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    memory: mmap.mmap
    start: int
    stop: int

    @property
    def sources(self) -> tuple["StoredTensor", ...]:
        """The stored tensors that this one is made of: itself."""
        return (self,)

    @property
    def dequantize(self) -> None:
        """Function that computes the tensor from its sources; None = it is stored as is."""
        return None

    def view(self) -> np.ndarray:
        """Return a read-only view of the tensor in the memory-mapped file, which changes with the file."""
        dtype = DTYPES[self.code]
        count = (self.stop - self.start) // dtype.itemsize
        flat = np.frombuffer(self.memory, dtype, count, self.start)
        return flat.reshape(self.shape)

    def release(self, part: np.ndarray | None = None) -> None:
        """Release the host memory of the tensor's pages; later accesses read them again.

        Args:
            part: View of `view()` whose bytes to release; None = the whole tensor.
        """
        start, stop = self.start, self.stop
        if part is not None:
            (begin, _), (first, end) = (np.lib.array_utils.byte_bounds(x) for x in (self.view(), part))
            start, stop = start + first - begin, start + end - begin
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self.memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def is_same_bytes(tensor_a: StoredTensor, tensor_b: StoredTensor) -> bool:
    """Return whether two tensors are equal bit by bit, and release the host memory of their pages."""
    if (tensor_a.code, tensor_a.shape) != (tensor_b.code, tensor_b.shape):
        return False
    bytes_a, bytes_b = (tensor.view().reshape(-1).view(np.uint8) for tensor in (tensor_a, tensor_b))
    for first in range(0, bytes_a.size, _COMPARED_BYTES):
        a, b = (array[first : first + _COMPARED_BYTES] for array in (bytes_a, bytes_b))
        if not np.array_equal(a, b):
            return False
        tensor_a.release(a)
        tensor_b.release(b)
    return True


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Only the header is read.

    Raises:
        ValueError: If the file is not a complete safetensors file.
    """
    size = path.stat().st_size
    if size <= _LENGTH_BYTES:
        raise _damaged_file_error(path, f"it has only {size} bytes")
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(f"{path} is a Git LFS pointer, not a safetensors file. Run `git lfs pull`.")
        file.seek(0)
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > size - _LENGTH_BYTES:
            raise _damaged_file_error(path, f"it has {size} bytes, but its header should have {length}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:  # from json or from the decoding
            raise _damaged_file_error(path, f"its header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise _damaged_file_error(path, f"its header is not a JSON object: {repr(header)[:60]}")
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    header.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + length
    try:
        tensors = {name: _tensor(name, entry, memory, data_start) for name, entry in header.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged_file_error(path, f"its header has an invalid entry ({error!r})") from error
    for tensor in tensors.values():
        if not _is_complete(tensor, data_start, size):
            place = f"bytes {tensor.start} to {tensor.stop} of {size}"
            raise _damaged_file_error(path, f"{tensor.name} {tensor.code} {tensor.shape} has {place}")
    return tensors


def _damaged_file_error(path: pathlib.Path, reason: str) -> ValueError:
    return ValueError(f"{path} is not a complete safetensors file: {reason}. Download it again.")


def _tensor(name: str, entry: Any, memory: mmap.mmap, data_start: int) -> StoredTensor:
    code, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    is_valid = (
        isinstance(code, str) and isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    )
    if not is_valid:
        raise TypeError(f"{name}: {code!r} {shape!r}")
    return StoredTensor(name, code, tuple(shape), memory, data_start + start, data_start + stop)


def _is_complete(tensor: StoredTensor, data_start: int, size: int) -> bool:
    if not data_start <= tensor.start <= tensor.stop <= size:
        return False
    dtype = DTYPES.get(tensor.code)
    return dtype is None or math.prod(tensor.shape) * dtype.itemsize == tensor.stop - tensor.start


SCALES_FILE = "kv_scales.safetensors"  # static KV-cache scales, if the model's own files have none
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
# Prefixes of files in a model's folder that do not hold its tensors under Hugging Face's names.
_IGNORED_PREFIXES = ("consolidated", "adapter_model", "kv_scales")
# Other formats that a folder may have, and what to do.
_OTHER_FORMATS = {
    "consolidated*.safetensors": "has Mistral's own tensor names, which are not supported: use the "
    "*.safetensors files of the same checkpoint that transformers reads",
    "adapter_model.*": "is an adapter, not a model: merge it into its model and save the result",
    "pytorch_model*.bin": "is pickled, which is not supported: convert it with transformers' "
    "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)",
    "*.pth": "is pickled, which is not supported: use the checkpoint in Hugging Face's format",
    "*.gguf": "is llama.cpp's format: use the checkpoint that it was converted from",
    "*/*.safetensors": "is in a subfolder: load that one if it has its own config.json",
}


def find_tensor_files(directory: pathlib.Path) -> tuple[list[pathlib.Path], Mapping[str, str]]:
    """Return the safetensors files of a folder, and the index's file name per tensor if there is an index.

    The files are model.safetensors; else those that the index names; else the numbered shards; else all.

    Raises:
        FileNotFoundError: If there is no file, or one that the index or the shards' numbers require is
            missing.
        ValueError: If the index is invalid.
    """
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists():
        return [single], {}
    if index.exists():
        return _files_in_index(index)
    paths = [path for path in directory.glob("*.safetensors") if not path.name.startswith(_IGNORED_PREFIXES)]
    shards = [path for path in paths if path.name.startswith("model-") and _SHARD.fullmatch(path.name)]
    paths = sorted(shards or paths)
    _require_all_shards(paths)
    if not paths:
        raise FileNotFoundError(f"{single} does not exist{_hint_other_formats(directory)}.")
    return paths, {}


def _files_in_index(index: pathlib.Path) -> tuple[list[pathlib.Path], Mapping[str, str]]:
    weight_map = read_json(index).get("weight_map") or {}
    are_names = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    require(
        are_names and len(weight_map) > 0,
        f"{index}'s weight_map",
        "map tensors to files",
        repr(weight_map)[:60],
    )
    names = sorted(set(weight_map.values()))
    invalid = [name for name in names if not name.endswith(".safetensors")]
    require(not invalid, f"{index}'s weight_map", "map tensors to safetensors files", ", ".join(invalid[:3]))
    for name in names:
        require_exists(index.parent / name, f" ({_INDEX} names it)")
    return [index.parent / name for name in names], weight_map


def _require_all_shards(paths: Sequence[pathlib.Path]) -> None:
    """Require that all numbered shards exist."""
    for path in paths:
        shard = _SHARD.fullmatch(path.name)
        if shard is None:
            continue
        for number in range(1, int(shard[3]) + 1):
            name = f"{shard[1]}-{number:0{len(shard[2])}}-of-{shard[3]}.safetensors"
            require_exists(path.with_name(name), f" ({path.name} is one of {int(shard[3])})")


def _hint_other_formats(directory: pathlib.Path) -> str:
    for pattern, hint in _OTHER_FORMATS.items():
        for path in sorted(directory.glob(pattern))[:1]:
            return f"; {path.relative_to(directory)} {hint}"
    return ""
