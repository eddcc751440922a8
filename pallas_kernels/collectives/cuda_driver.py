"""Calls of the CUDA driver: peer access between GPUs, and memory that other processes can open."""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
# Bytes. The driver suballocates smaller requests from a shared block, all of which a handle would open.
_ALLOCATION_UNIT = 1 << 21


class DriverError(Exception):
    """Error for a missing driver or a failed driver call, which the message names."""


class _CUipcMemHandle(ctypes.Structure):
    """CUipcMemHandle, a struct that is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class Driver:
    """The CUDA driver library, libcuda.

    GPUs are identified by their index in this process, `jax.Device.local_hardware_id`; both count the devices
    in CUDA_VISIBLE_DEVICES. The index of another process's device has no meaning here.
    """

    def __init__(self) -> None:
        """Load the library.

        Raises:
            DriverError: If there is no driver.
        """
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            message = "there is no CUDA driver, which must report peer access between GPUs"
            raise DriverError(message) from error

    def indices(self) -> dict[str, int]:
        """Return the index of each GPU that this process can use, by its UUID."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return {self.uuid(index): index for index in range(count.value)}

    def uuid(self, device_ordinal: int) -> str:
        """Return a GPU's UUID, which identifies it in all processes, as hexadecimal digits."""
        uuid = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), self._device(device_ordinal))
        return bytes(uuid).hex()

    def can_access_peer(self, device_ordinal: int, peer: int) -> bool:
        """Return whether a GPU can access another GPU's memory."""
        can = ctypes.c_int()
        self._call(
            "cuDeviceCanAccessPeer", ctypes.byref(can), self._device(device_ordinal), self._device(peer)
        )
        return bool(can.value)

    def enable_peer_access(self, device_ordinal: int, peer: int) -> None:
        """Enable a GPU's access to the memory of another GPU of this process."""
        with self._context(device_ordinal):
            self._call(
                "cuCtxEnablePeerAccess",
                self._primary_context(peer),
                ctypes.c_uint(0),
                unless=_ALREADY_ENABLED,
            )

    def allocate(self, device_ordinal: int, num_bytes: int) -> int:
        """Allocate memory of a GPU outside XLA's pool and return its address."""
        address, rounded = ctypes.c_uint64(), -(-num_bytes // _ALLOCATION_UNIT) * _ALLOCATION_UNIT
        with self._context(device_ordinal):
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(rounded))
        return address.value

    def fill(self, device_ordinal: int, address: int, runs: Sequence[tuple[int, int]]) -> None:
        """Fill memory with consecutive runs of (32-bit word, count), and wait until it is written."""
        with self._context(device_ordinal):
            for word, count in runs:
                arguments = ctypes.c_uint64(address), ctypes.c_uint(word), ctypes.c_size_t(count)
                self._call("cuMemsetD32_v2", *arguments)
                address += 4 * count
            self._call("cuCtxSynchronize")

    def free(self, device_ordinal: int, address: int) -> None:
        """Free allocated memory; every process that opened it must have closed it."""
        with self._context(device_ordinal):
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, device_ordinal: int, address: int) -> str:
        """Return the IPC handle by which other processes open allocated memory, as hexadecimal digits."""
        handle = _CUipcMemHandle()
        with self._context(device_ordinal):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle).hex()

    def open(self, device_ordinal: int, handle: str) -> int:
        """Open another process's memory for a GPU of this process and return its address there."""
        address, by_value = ctypes.c_uint64(), _CUipcMemHandle.from_buffer_copy(bytes.fromhex(handle))
        with self._context(device_ordinal):
            flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, flags)
        return address.value

    def close(self, device_ordinal: int, address: int) -> None:
        """Close memory that was opened."""
        with self._context(device_ordinal):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    @contextlib.contextmanager
    def _context(self, device_ordinal: int) -> Iterator[None]:
        """Make a GPU's context current."""
        self._call("cuCtxPushCurrent_v2", self._primary_context(device_ordinal))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _primary_context(self, device_ordinal: int) -> ctypes.c_void_p:
        """Return a GPU's primary context, which XLA uses; it stays retained, like memory opened in it."""
        context, device = ctypes.c_void_p(), self._device(device_ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context

    def _device(self, device_ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int(-1)
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(device_ordinal))
        return device

    def _call(self, name: str, *arguments: object, unless: int = 0) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status and status != unless:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
            raise DriverError(f"{name} failed with {(text.value or str(status).encode()).decode()}")
