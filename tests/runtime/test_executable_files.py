"""When executables are written to files, and what JAX's cache gets meanwhile."""

import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from jattn.batch.bucket import Bucket
from jattn.runtime import executable_files
from jattn.runtime.executable_files import FOLDER, ExecutableFiles
from jattn.runtime.executables import CODEGEN_LOCK, ExecutableCache
from jattn.runtime.lowering import AbstractStep, PickledStep
from tests.subprocesses import ROOT

BUCKET = Bucket(max_decodes=1, max_blocks=1)


def double(x):
    return 2 * x


def request(shape=(2,)):
    step = AbstractStep(double, jax.ShapeDtypeStruct(shape, jnp.float32), (), from_host=False)
    return PickledStep.of(step).request(())


@pytest.fixture
def executable():
    """Compile a new function: on a CPU, an executable from JAX's cache cannot be written again."""
    new = time.time_ns() % 2**20
    return jax.jit(lambda x: 2 * x + new).lower(jax.ShapeDtypeStruct((2,), jnp.float32)).compile()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files that are written as soon as no step runs, or never."""
    monkeypatch.setattr(executable_files, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(executable_files, "BUSY_SECONDS", float("inf"))
    return ExecutableFiles(tmp_path)


class TestWriting:
    def test_waits_while_steps_run(self, files, executable):
        file = files.file_of(request(), {})
        files.last_step = float("inf")
        files.write_later(file, executable, 0)
        time.sleep(0.3)
        assert not file.exists()
        files.last_step = 0.0
        files.wait()
        assert file.exists()

    def test_waits_while_others_compile(self, files, executable):
        file = files.file_of(request(), {})
        with CODEGEN_LOCK:
            files.write_later(file, executable, 0)
            time.sleep(0.3)
            assert not file.exists()
        files.wait()
        assert file.exists()

    def test_happens_now_and_then_in_spite_of_steps(self, files, executable, monkeypatch):
        monkeypatch.setattr(executable_files, "BUSY_SECONDS", 0.1)
        files.last_step = float("inf")
        files.write_later(files.file_of(request(), {}), executable, 0)
        files.wait()
        assert files.file_of(request(), {}).exists()


class TestFileOf:
    def test_depends_on_the_step_and_on_the_compiler_options(self, files):
        names = [
            files.file_of(request(shape), options)
            for shape in ((2,), (3,))
            for options in ({}, {"xla_a": 1}, {"xla_a": 2})
        ]
        assert len(set(names)) == len(names)
        assert names[0] == files.file_of(request(), {})

    def test_depends_on_the_flags_of_xla(self, files, monkeypatch):
        before = files.file_of(request(), {})
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
        assert files.file_of(request(), {}) != before


class TestLoading:
    def test_returns_a_working_executable(self, files, executable):
        x = jnp.arange(2.0)
        file = files.file_of(request(), {})
        files.write_later(file, executable, jax.ShapeDtypeStruct((2,), jnp.float32))
        files.wait()
        loaded = files.load(file, jax.devices()[0], (x,))
        assert loaded(x).tolist() == executable(x).tolist()

    def test_without_a_file_returns_none(self, files):
        assert files.load(files.file_of(request(), {}), jax.devices()[0], ()) is None

    @pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[::-1]])
    def test_of_a_damaged_file_warns_and_returns_none(self, files, executable, damage):
        file = files.file_of(request(), {})
        files.write_later(file, executable, 0)
        files.wait()
        file.write_bytes(damage(file.read_bytes()))
        with pytest.warns(UserWarning, match="is damaged and will be replaced"):
            assert files.load(file, jax.devices()[0], ()) is None


@pytest.mark.parametrize("has_files", [False, True])
def test_jax_writes_steps_to_its_cache_only_without_files(has_files, jax_cache):
    executables, compiled = ExecutableCache(lambda bucket: {}), []
    executables.compile_groups_in_background(
        [[BUCKET]],
        lambda bucket: jax.jit(lambda x: (3 + has_files) * x).lower(1.0),
        lowering_threads=1,
        progress=False,
        on_compiled=lambda bucket, executable: compiled.extend([bucket] * has_files),
        kept=[BUCKET] * has_files,
    )
    executables.wait()
    assert compiled == [BUCKET] * has_files
    assert any(jax_cache.iterdir()) != has_files
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


def test_a_process_that_ends_writes_its_files(tmp_path):
    """The last step was just now, and steps would delay the writing for an hour."""
    code = f"""
import jax
from jattn.runtime import executable_files
executable_files.QUIET_SECONDS = executable_files.BUSY_SECONDS = 3600
files = executable_files.ExecutableFiles({str(tmp_path)!r})
files.last_step = float("inf")
for i in range(2):
    executable = jax.jit(lambda x: x + i).lower(1.0).compile()
    files.write_later(files._folder / str(i), executable, 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["0", "1"]
