"""Safetensors files of a checkpoint: finding them, reading headers, and memory-mapped tensors."""

import dataclasses
import json
import mmap
import pathlib
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jattn.models.loading.files import optional_module, read_json, require_exists

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

    def release(self) -> None:
        """Release the host memory of the tensor's pages; later accesses read them again."""
        first = -(-self.start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = self.stop // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self.memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Only the header is read.

    Raises:
        ValueError: If the file is not a complete safetensors file.
        ImportError: If safetensors is not installed.
    """
    safetensors = optional_module("safetensors")
    try:
        safetensors.safe_open(path, framework="numpy")  # checks that the file is complete
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file: {error}. Download it again, in a Git checkout with "
            "`git lfs pull`."
        ) from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, stop = (_LENGTH_BYTES + length + offset for offset in entry["data_offsets"])
        tensors[name] = StoredTensor(name, entry["dtype"], tuple(entry["shape"]), memory, start, stop)
    return tensors


SCALES_FILE = "kv_scales.safetensors"  # static KV-cache scales, if the model's own files have none
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Prefixes of files in a model's folder that do not hold its tensors under Hugging Face's names.
_IGNORED_PREFIXES = ("consolidated", "adapter_model", "kv_scales")


def find_tensor_files(directory: pathlib.Path) -> tuple[list[pathlib.Path], Mapping[str, str]]:
    """Return the safetensors files of a folder, and the index's file name per tensor if there is an index.

    The files are model.safetensors; else those that the index names; else all.

    Raises:
        FileNotFoundError: If there is no file, or one that the index names is missing.
    """
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists():
        return [single], {}
    if index.exists():
        weight_map = read_json(index).get("weight_map") or {}
        reason = f" ({_INDEX} names it)"
        return [
            require_exists(directory / name, reason) for name in sorted({*weight_map.values()})
        ], weight_map
    paths = [path for path in directory.glob("*.safetensors") if not path.name.startswith(_IGNORED_PREFIXES)]
    if not paths:
        raise FileNotFoundError(
            f"{single} does not exist. Convert files of another format with transformers' "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder), and merge adapters."
        )
    return sorted(paths), {}
