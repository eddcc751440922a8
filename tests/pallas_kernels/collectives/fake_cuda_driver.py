"""A stand-in for the CUDA driver of two processes with CPU devices."""

import struct

import numpy as np

SEEN_AT = 1 << 50  # added to an address of process n by who opens it: n + 1 times this
OUT_OF_MEMORY, ALREADY_ENABLED, NOT_PERMITTED = 2, 704, 800
ERRORS = {
    1: b"CUDA_ERROR_INVALID_VALUE",
    OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
    NOT_PERMITTED: b"CUDA_ERROR_NOT_PERMITTED",
}


class Cuda:
    """libcuda of one process, in which the memory of the other process has other addresses.

    Attributes:
        rank: Rank of the process.
        num_own: Number of GPUs per process; those of this process come first, as XLA numbers CPU devices.
        hides_others: Whether the driver shows the process its own GPUs only.
        reaches: Whether GPUs can access the memory of the other process's GPUs.
        failing: Name of a driver call that fails.
        context: Stack of pushed contexts.
        allocated: Allocated memory by address; only it has IPC handles, since XLA's pool has none.
        contexts: Context of each allocation, by address.
        is_filling: Whether a memset is in progress.
        open: Number of times each handle is open.
        ways: Pairs of contexts of which the first may access the second's memory.
        log: Names of the memory calls.
    """

    def __init__(self, rank, *, num_own=1, hides_others=False, reaches=True, failing=None):
        self.rank, self.num_own, self.hides_others = rank, num_own, hides_others
        self.reaches, self.failing = reaches, failing
        self.context, self.allocated, self.contexts, self.is_filling = [], {}, {}, False
        self.open, self.ways, self.log = {}, set(), []

    def __call__(self, name):
        """Replace ctypes.CDLL."""
        assert name == "libcuda.so.1"
        return self

    def __getattribute__(self, name):
        failing = object.__getattribute__(self, "__dict__").get("failing")
        if name == failing:
            return lambda *_: OUT_OF_MEMORY if name == "cuMemAlloc_v2" else NOT_PERMITTED
        if name.startswith(("cuMem", "cuIpc")):
            assert self.context, name
            self.log.append(name)
        return object.__getattribute__(self, name)

    def cuGetErrorName(self, status, text):
        text._obj.value = ERRORS.get(status.value)

    def cuDeviceGet(self, device, number):
        assert 0 <= number.value < self.num_visible
        device._obj.value = number.value

    @property
    def num_visible(self):
        return self.num_own * (1 if self.hides_others else 2)

    def cuDeviceGetCount(self, count):
        count._obj.value = self.num_visible

    def cuDeviceGetUuid_v2(self, uuid, device):
        is_own = device.value < self.num_own
        rank = self.rank if is_own else 1 - self.rank
        uuid._obj[:2] = [rank, device.value % self.num_own]

    def cuDeviceCanAccessPeer(self, can, one, other):
        can._obj.value = self.reaches or other.value < self.num_own

    def cuDevicePrimaryCtxRetain(self, context, device):
        assert device.value < self.num_own, "a process has no context of the other's GPU"
        context._obj.value = 1 + device.value

    def cuCtxPushCurrent_v2(self, context):
        self.context.append(context.value)

    def cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.context.pop()

    def cuCtxEnablePeerAccess(self, peer, flags):
        assert flags.value == 0
        pair = self.context[-1], peer.value
        assert pair[0] != pair[1]
        is_new = pair not in self.ways
        self.ways.add(pair)
        return 0 if is_new else ALREADY_ENABLED

    def cuCtxSynchronize(self):
        assert self.context
        self.is_filling = False

    def cuMemAlloc_v2(self, address, size):
        words = np.full(size.value // 4, 0xDEADBEEF, np.uint32)
        address._obj.value = words.ctypes.data
        self.allocated[words.ctypes.data], self.contexts[words.ctypes.data] = words, self.context[-1]

    def cuMemsetD32_v2(self, address, word, count):
        base = next(
            start for start, words in self.allocated.items() if 0 <= address.value - start < words.nbytes
        )
        first = (address.value - base) // 4
        assert first + count.value <= self.allocated[base].size
        self.allocated[base][first : first + count.value] = word.value
        self.is_filling = True

    def cuMemFree_v2(self, address):
        assert self.contexts.pop(address.value) == self.context[-1]
        del self.allocated[address.value]

    def cuIpcGetMemHandle(self, handle, base):
        assert not self.is_filling
        if self.contexts.get(base.value) != self.context[-1]:
            return 1
        handle._obj.reserved[:16] = struct.pack("<QQ", self.rank, base.value)

    def cuIpcOpenMemHandle_v2(self, base, handle, flags):
        assert flags.value == 1
        rank, address = struct.unpack_from("<QQ", bytes(handle.reserved))
        assert rank != self.rank, "a process does not open what is its own"
        base._obj.value = address + SEEN_AT * (1 + rank)
        self.open[base._obj.value] = self.open.get(base._obj.value, 0) + 1

    def cuIpcCloseMemHandle(self, base):
        self.open[base.value] -= 1
        if self.open[base.value] == 0:
            del self.open[base.value]
