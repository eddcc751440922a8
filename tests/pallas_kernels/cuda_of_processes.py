"""A stand-in for the CUDA driver, for two processes whose devices are a CPU's."""

import struct

SEEN_AT = 1 << 50  # added to an address of process n by who opens it: n + 1 times this
ALLOCATION = 1 << 16  # bytes: addresses lie somewhere in one
NOT_PERMITTED = 800


class Cuda:
    """libcuda of one process, which finds the other's memory where that is not.

    Attributes:
        rank: The process's number.
        num_own: GPUs of each process; its own come first, as XLA numbers devices of a CPU.
        hides_others: The driver shows the process its own alone.
        reaches: Whether a GPU reaches another.
        failing: Name of a call that fails.
        context: Contexts that were pushed and not popped.
        open: Handles that were opened, with how often.
    """

    def __init__(self, rank, *, num_own=1, hides_others=False, reaches=True, failing=None):
        self.rank, self.num_own, self.hides_others = rank, num_own, hides_others
        self.reaches, self.failing = reaches, failing
        self.context, self.open = [], {}

    def __call__(self, name):
        """In the place of ctypes.CDLL."""
        assert name == "libcuda.so.1"
        return self

    def __getattribute__(self, name):
        failing = object.__getattribute__(self, "__dict__").get("failing")
        return (lambda *_: NOT_PERMITTED) if name == failing else object.__getattribute__(self, name)

    def cuGetErrorName(self, status, text):
        text._obj.value = {NOT_PERMITTED: b"CUDA_ERROR_NOT_PERMITTED"}.get(status.value)

    def cuDeviceGet(self, device, number):
        device._obj.value = number.value

    def cuDeviceGetCount(self, count):
        count._obj.value = self.num_own * (1 if self.hides_others else 2)

    def cuDeviceGetUuid_v2(self, uuid, device):
        own = device.value < self.num_own
        rank = self.rank if own else 1 - self.rank
        uuid._obj[:2] = [rank, device.value % self.num_own]

    def cuDeviceCanAccessPeer(self, can, one, other):
        can._obj.value = self.reaches or one.value == other.value

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 1 + device.value

    def cuCtxPushCurrent_v2(self, context):
        self.context.append(context.value)

    def cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.context.pop()

    def cuMemGetAddressRange_v2(self, base, size, address):
        assert self.context
        base._obj.value = address.value - address.value % ALLOCATION
        size._obj.value = ALLOCATION

    def cuIpcGetMemHandle(self, handle, base):
        assert self.context
        assert base.value % ALLOCATION == 0
        handle._obj.reserved[:16] = struct.pack("<QQ", self.rank, base.value)

    def cuIpcOpenMemHandle_v2(self, base, handle, flags):
        assert self.context
        assert flags.value == 1
        key = bytes(handle.reserved)
        rank, there = struct.unpack_from("<QQ", key)
        assert rank != self.rank, "a process does not open what is its own"
        self.open[key] = self.open.get(key, 0) + 1
        base._obj.value = there + SEEN_AT * (1 + rank)
