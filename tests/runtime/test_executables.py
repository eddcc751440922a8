"""Groups of executables: each compiles once, and kernels before the modules that contain them."""

import contextlib
import sys
import threading
import time

import jax
import pytest

from jattn.batch.bucket import Bucket
from jattn.runtime.executables import SWITCH_INTERVAL, ExecutableCache, ShortSwitchInterval
from tests import aot


def test_a_second_compilation_lasts_until_the_first_has_compiled_its_buckets():
    bucket, gate, calls = Bucket(max_decodes=1, max_blocks=1), threading.Event(), []

    def lower(bucket):
        calls.append(bucket)
        assert gate.wait(60)
        return jax.jit(lambda: 1).lower()

    executables = ExecutableCache(lambda bucket: {})
    for _ in range(2):
        executables.compile_groups_in_background([[bucket]], lower, lowering_threads=1, progress=False)
    executables._background.join(0.5)
    assert executables.is_compiling
    gate.set()
    executables.wait()
    assert list(executables.ready) == calls == [bucket]


def test_threads_switch_sooner_while_any_of_them_compiles():
    before = sys.getswitchinterval()
    interval = ShortSwitchInterval()
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(interval)
    second.enter_context(interval)
    first.close()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
    second.close()
    assert sys.getswitchinterval() == before


def test_waiting_includes_a_background_thread_that_has_not_started_yet(monkeypatch):
    class LateThread(threading.Thread):
        def run(self):
            time.sleep(0.2)
            super().run()

    monkeypatch.setattr("jattn.runtime.executables.threading.Thread", LateThread)
    bucket, executables = Bucket(max_decodes=1, max_blocks=1), ExecutableCache(lambda bucket: {})
    executables.compile_groups_in_background(
        [[bucket]], lambda _: jax.jit(lambda: 1).lower(), lowering_threads=1, progress=False
    )
    executables.wait_for([bucket])
    assert list(executables.ready) == [bucket]
    executables.wait()


@pytest.mark.kernels
def test_xla_finds_the_kernels_that_were_compiled_beforehand():
    aot.require_plugin()
    cases = "tests.pallas_kernels.paged_decode.decode_aot_cases"
    name = "gqa4-d64-plain-block8-NHD-float16"
    before, after = aot.kernels_beforehand(cases, [name])[name]
    assert len(before) == 2  # the splits and their combination
    assert after == []
