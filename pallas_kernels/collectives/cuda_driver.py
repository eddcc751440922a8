"""What the CUDA driver is asked: who reaches whose memory, and for memory that other processes open."""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
_GRAIN = 1 << 21  # bytes: less of them the driver cuts from a block, and a handle opens all of that


class DriverError(Exception):
    """The driver is missing or refuses a call, which the message names."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class Driver:
    """libcuda. GPUs are named by their number in this process, `jax.Device.local_hardware_id`.

    Both count what CUDA_VISIBLE_DEVICES leaves. Of another process's device that number means nothing here.
    """

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

    def let_reach(self, number: int, other: int) -> None:
        """Opens the way from a GPU to the memory of another of this process."""
        with self._context(number):
            self._call(
                "cuCtxEnablePeerAccess", self._primary(other), ctypes.c_uint(0), unless=_ALREADY_ENABLED
            )

    def allocate(self, number: int, num_bytes: int) -> int:
        """The address of new memory of a GPU, besides XLA's."""
        address, rounded = ctypes.c_uint64(), -(-num_bytes // _GRAIN) * _GRAIN
        with self._context(number):
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(rounded))
        return address.value

    def fill(self, number: int, address: int, runs: Sequence[tuple[int, int]]) -> None:
        """Writes words of 32 bits, each so many times, one run behind the other, and waits for that."""
        with self._context(number):
            for word, times in runs:
                place = ctypes.c_uint64(address), ctypes.c_uint(word), ctypes.c_size_t(times)
                self._call("cuMemsetD32_v2", *place)
                address += 4 * times
            self._call("cuCtxSynchronize")

    def free(self, number: int, address: int) -> None:
        """What was allocated; the driver demands that all who opened it have closed it."""
        with self._context(number):
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, number: int, address: int) -> str:
        """By which other processes open what was allocated, as hexadecimal digits."""
        handle = _Handle()
        with self._context(number):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle).hex()

    def open(self, number: int, handle: str) -> int:
        """The address that a GPU of this process finds another process's memory at."""
        address, by_value = ctypes.c_uint64(), _Handle.from_buffer_copy(bytes.fromhex(handle))
        with self._context(number):
            flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, flags)
        return address.value

    def close(self, number: int, address: int) -> None:
        """The inverse."""
        with self._context(number):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    @contextlib.contextmanager
    def _context(self, number: int) -> Iterator[None]:
        """In which memory of a GPU is made and opened."""
        self._call("cuCtxPushCurrent_v2", self._primary(number))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _primary(self, number: int) -> ctypes.c_void_p:
        """XLA's context of a GPU, which is the primary one: it is held for good, as what is opened in it."""
        context, device = ctypes.c_void_p(), self._device(number)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context

    def _device(self, number: int) -> ctypes.c_int:
        device = ctypes.c_int(-1)
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
        return device

    def _call(self, name: str, *arguments: object, unless: int = 0) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status and status != unless:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
            raise DriverError(f"{name} says {(text.value or str(status).encode()).decode()}")
