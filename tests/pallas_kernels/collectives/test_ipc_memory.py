"""Processes of one host open each other's memory and reduce together, or none does; several hosts are
refused.
"""

import jax
import pytest

from pallas_kernels.collectives import cuda_driver, ipc_memory, support
from pallas_kernels.collectives.cuda_driver import Driver, DriverError
from tests.pallas_kernels.collectives.fake_cuda_driver import ERRORS, NOT_PERMITTED, SEEN_AT, Cuda
from tests.subprocesses import free_port, run_processes

RIGHT = {
    "cpu": ("{'tp': 2, 'cp': 2}, 68 wide: right", "{'tp': 4, 'cp': 1}, 68 wide: right"),
    "gpu": ("4096 wide: right", "1028 wide: right"),
}
REFUSED = (
    "cannot allocate 4 bytes outside XLA's pool to share with other processes "
    "(cuMemAlloc_v2 failed with CUDA_ERROR_OUT_OF_MEMORY)",
    "to share with other processes (cuIpcGetMemHandle failed with CUDA_ERROR_NOT_PERMITTED)",
    "cannot open the memory of GPU 0 (cuIpcOpenMemHandle_v2 failed with CUDA_ERROR_NOT_PERMITTED)",
    "to share with other processes (cuDevicePrimaryCtxRetain failed with CUDA_ERROR_NOT_PERMITTED)",
    "cannot access the memory of GPU 0",
    "(cuCtxEnablePeerAccess failed with CUDA_ERROR_NOT_PERMITTED)",
    "make_peer_memory: it is too late. Use jax.lax.psum on these devices.",
    "make_peer_memory: the devices belong to several hosts (host0, host1). Use jax.lax.psum",
)


def run_two(target):
    """Return the output of both processes as text, since gloo prints lines in between."""
    port = str(free_port())
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process has a GPU's memory
    module = "tests.pallas_kernels.collectives.run_in_processes"
    ends = run_processes([[module, port, str(rank), target] for rank in range(2)], environment)
    assert [code for code, *_ in ends] == [0, 0], ends[0][2][-4000:] + ends[1][2][-4000:]
    return ["\n".join(lines) for _, lines, _ in ends]


def test_two_processes_sum_or_agree_not_to():
    for text in run_two("cpu"):
        assert all(right in text for right in RIGHT["cpu"]), text
        refused = [line for line in text.splitlines() if line.startswith("make_peer_memory: ")]
        assert len(refused) == len(REFUSED), text
        assert all(expected in line for expected, line in zip(REFUSED, refused, strict=True)), refused


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("target", ["gpu", "gpus"])
def test_two_gpu_processes_sum(target):
    """Each process sees its own GPU, or both."""
    if len(jax.devices()) < 2:
        pytest.skip("one GPU")
    for text in run_two(target):
        assert all(right in text for right in RIGHT["gpu"]), text


def test_devices_of_a_part_of_the_processes_are_refused(monkeypatch, types_unchecked):
    class GPU:
        platform, compute_capability = "cuda", "9.0"

        def __init__(self, process):
            self.process_index = process

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    reason = "the devices belong to 2 of 3 processes (they must belong to one or to all)"
    assert support.why_not_peer_memory([GPU(0), GPU(1)], 2) == reason


def test_an_unexpected_error_is_sent_to_the_other_processes(monkeypatch):
    sent = []
    allgather = lambda words: (sent.append(bytes(words).rstrip(b"\0").decode()), words[None])[1]
    monkeypatch.setattr(ipc_memory.multihost_utils, "process_allgather", allgather)
    monkeypatch.setattr(ipc_memory, "Driver", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ipc_memory.share_memory(jax.devices(), [(0, 1)])
    message = '{"failed": "process 0: integer division or modulo by zero"}'
    assert sent == [message, message]  # when sharing, and when freeing, which are collective operations


def use_memory(driver, address):
    driver.fill(0, address, [(0, 6)])
    driver.handle(0, address)
    driver.free(0, address)


class TestDriver:
    @pytest.fixture
    def cuda(self, monkeypatch):
        cuda = Cuda(0)
        monkeypatch.setattr(cuda_driver.ctypes, "CDLL", cuda)
        return cuda

    def test_another_process_finds_memory_that_was_allocated(self, cuda):
        address = Driver().allocate(0, 24)
        handle = Driver().handle(0, address)
        cuda.rank = 1
        for times in (1, 2):
            assert Driver().open(0, handle) == SEEN_AT + address
            assert set(cuda.open.values()) == {times}
        assert cuda.context == []  # as it was before

    def test_other_memory_has_no_handle(self, cuda):
        array = jax.numpy.zeros(8)  # XLA's
        with pytest.raises(DriverError, match="cuIpcGetMemHandle failed with CUDA_ERROR_INVALID_VALUE"):
            Driver().handle(0, array.unsafe_buffer_pointer())

    def test_memory_shares_no_block_with_other_memory(self, cuda):
        assert cuda.allocated[Driver().allocate(0, (1 << 21) + 4)].nbytes == 2 << 21

    def test_hidden_gpu_has_no_number(self, cuda):
        assert sorted(Driver().indices().values()) == [0, 1]
        cuda.hides_others = True
        assert Driver().indices() == {Driver().uuid(0): 0}

    @pytest.mark.parametrize(
        "failing",
        ["cuMemsetD32_v2", "cuCtxSynchronize", "cuIpcGetMemHandle", "cuCtxPushCurrent_v2", "cuMemFree_v2"],
    )
    def test_failed_call_is_reported_by_name(self, cuda, failing):
        address = Driver().allocate(0, 24)
        cuda.failing = failing
        with pytest.raises(DriverError, match=f"{failing} failed with CUDA_ERROR_NOT_PERMITTED"):
            use_memory(Driver(), address)

    def test_status_without_a_name_is_reported_as_a_number(self, cuda, monkeypatch):
        monkeypatch.delitem(ERRORS, NOT_PERMITTED)
        cuda.failing = "cuIpcOpenMemHandle_v2"
        with pytest.raises(DriverError, match="cuIpcOpenMemHandle_v2 failed with 800"):
            Driver().open(0, "00" * 64)

    def test_missing_driver_is_reported(self, monkeypatch):
        def none(name):
            raise OSError(name)

        monkeypatch.setattr(cuda_driver.ctypes, "CDLL", none)
        with pytest.raises(DriverError, match="there is no CUDA driver, which must report peer access"):
            Driver()
