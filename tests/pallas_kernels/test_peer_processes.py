"""Processes of one host open each other's memory and sum, or none does; several hosts are refused."""

import os

import jax
import pytest

from pallas_kernels.all_reduce import driver, reasons
from pallas_kernels.all_reduce.driver import Driver, DriverError, Exported
from tests.pallas_kernels.cuda_of_processes import ALLOCATION, SEEN_AT, Cuda
from tests.two_processes import free_port, run_both

RIGHT = {
    "cpu": ("{'tp': 2, 'cp': 2}, 68 wide: right", "{'tp': 4, 'cp': 1}, 68 wide: right"),
    "gpu": ("4096 wide: right", "1028 wide: right"),
}
REFUSED = (
    "process 1: XLA's memory cannot be opened by other processes (cuIpcGetMemHandle says "
    "CUDA_ERROR_NOT_PERMITTED; leave XLA_PYTHON_CLIENT_ALLOCATOR at its default)",
    "cannot open the memory of GPU 0 (cuIpcOpenMemHandle_v2 says CUDA_ERROR_NOT_PERMITTED)",
    "cuDevicePrimaryCtxRetain says CUDA_ERROR_NOT_PERMITTED",
    "does not reach the memory of GPU 0",
    "make_peer_memory: it is too late. jax.lax.psum sums there",
    "make_peer_memory: devices are of several hosts (host0, host1). jax.lax.psum sums there",
)


def run_two(where):
    """What both print, as text: gloo's own lines may stand in the middle of others."""
    port = str(free_port())
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process has a GPU's memory
    module = "tests.pallas_kernels.sums_of_processes"
    ends = run_both([[module, port, str(rank), where] for rank in range(2)], environment)
    assert [code for code, *_ in ends] == [0, 0], ends[0][2][-4000:] + ends[1][2][-4000:]
    return ["\n".join(lines) for _, lines, _ in ends]


def test_two_processes_sum_and_agree_where_one_cannot():
    for text in run_two("cpu"):
        assert all(right in text for right in RIGHT["cpu"]), text
        refused = [line for line in text.splitlines() if line.startswith("make_peer_memory: ")]
        assert len(refused) == len(REFUSED), text
        assert all(wanted in line for wanted, line in zip(REFUSED, refused, strict=True)), refused


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("where", ["gpu", "gpus"])
def test_two_processes_of_a_gpu_each_sum(where):
    """Each sees its own GPU alone, or both."""
    if len(jax.devices()) < 2:
        pytest.skip("one GPU")
    for text in run_two(where):
        assert all(right in text for right in RIGHT["gpu"]), text


def test_devices_of_a_part_of_the_processes_are_refused(monkeypatch, types_unchecked):
    class GPU:
        platform, compute_capability = "cuda", "9.0"

        def __init__(self, process):
            self.process_index = process

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    reason = "devices are of 2 of 3 processes (all of them have some, or one has all)"
    assert reasons.why_not_peers([GPU(0), GPU(1)], 2) == reason


class TestDriver:
    @pytest.fixture
    def cuda(self, monkeypatch):
        cuda = Cuda(0)
        monkeypatch.setattr(driver.ctypes, "CDLL", cuda)
        return cuda

    def test_another_process_finds_an_address_where_its_allocation_is(self, cuda):
        exported = Driver().exported(0, 5 * ALLOCATION + 24)
        assert exported.offset == 24
        cuda.rank = 1
        for times in (1, 2):
            assert Driver().opened(0, exported) == SEEN_AT + 5 * ALLOCATION + 24
            assert set(cuda.open.values()) == {times}
        assert cuda.context == []  # as it was before

    def test_a_gpu_that_is_hidden_has_no_number(self, cuda):
        assert sorted(Driver().numbers().values()) == [0, 1]
        cuda.hides_others = True
        assert Driver().numbers() == {Driver().uuid(0): 0}

    @pytest.mark.parametrize(
        "failing", ["cuMemGetAddressRange_v2", "cuIpcGetMemHandle", "cuCtxPushCurrent_v2"]
    )
    def test_a_call_that_fails_is_named(self, cuda, failing):
        cuda.failing = failing
        with pytest.raises(DriverError, match=f"{failing} says CUDA_ERROR_NOT_PERMITTED"):
            Driver().exported(0, 24)

    def test_a_status_without_a_name_is_a_number(self, cuda, monkeypatch):
        monkeypatch.setattr(cuda, "cuIpcOpenMemHandle_v2", lambda *_: 999)
        with pytest.raises(DriverError, match="cuIpcOpenMemHandle_v2 says 999"):
            Driver().opened(0, Exported("00" * 64, 0))

    def test_there_must_be_one(self, monkeypatch):
        def none(name):
            raise OSError(name)

        monkeypatch.setattr(driver.ctypes, "CDLL", none)
        with pytest.raises(DriverError, match="there is no CUDA driver to ask whether GPUs reach"):
            Driver()
