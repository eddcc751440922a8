"""What the CUDA driver is asked: who reaches whose memory, and how one process opens another's."""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import NamedTuple

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class DriverError(Exception):
    """The driver is missing or refuses a call, which the message names."""


class Exported(NamedTuple):
    """An address as another process can open it.

    Attributes:
        handle: Of the allocation that the address lies in, as hexadecimal digits.
        offset: Bytes from its beginning.
    """

    handle: str
    offset: int


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class Driver:
    """libcuda. GPUs are named by their number in this process, `jax.Device.local_hardware_id`."""

    def __init__(self) -> None:
        """Raises DriverError where there is none."""
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            lacks = "there is no CUDA driver to ask whether GPUs reach each other's memory"
            raise DriverError(lacks) from error

    def numbers(self) -> dict[str, int]:
        """GPUs that this process sees, by their UUID."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return {self.uuid(number): number for number in range(count.value)}

    def uuid(self, number: int) -> str:
        """What names a GPU in all processes, as hexadecimal digits."""
        found = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), self._device(number))
        return bytes(found).hex()

    def reaches(self, number: int, other: int) -> bool:
        """Whether a GPU can address another's memory."""
        can = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(can), self._device(number), self._device(other))
        return bool(can.value)

    def exported(self, number: int, address: int) -> Exported:
        """An address of a GPU's memory, for other processes."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        with self._context(number):
            place = ctypes.byref(base), ctypes.byref(size)
            self._call("cuMemGetAddressRange_v2", *place, ctypes.c_uint64(address))
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return Exported(bytes(handle).hex(), address - base.value)

    def opened(self, number: int, exported: Exported) -> int:
        """The address that a GPU of this process finds another process's memory at.

        It stays open as long as the process lives: nothing tells when the last kernel that uses it has ended.
        The driver counts who opens an allocation again, and gives the same address.
        """
        base, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(bytes.fromhex(exported.handle))
        with self._context(number):
            flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, flags)
        return base.value + exported.offset

    @contextlib.contextmanager
    def _context(self, number: int) -> Iterator[None]:
        """XLA's context of a GPU, which is the primary one: it is held for good, as what is opened in it."""
        context, device = ctypes.c_void_p(), self._device(number)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(context))

    def _device(self, number: int) -> ctypes.c_int:
        device = ctypes.c_int(-1)
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
        return device

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
            raise DriverError(f"{name} says {(text.value or str(status).encode()).decode()}")
