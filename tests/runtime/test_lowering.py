"""Steps that other processes lower, or that come from files, give the results of steps lowered here."""

import gc
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import build_batch_metadata
from jattn.models.decoder import Decoder
from jattn.runtime import lowering
from jattn.runtime.decode_graphs import DecodeGraphs
from jattn.runtime.executable_files import FOLDER, ExecutableFiles
from jattn.runtime.lowering import AbstractStep, LoweringProcesses, PickledStep
from jattn.serving.engine.step import ModelInputs, ModelStep
from tests.serving.tiny import one_layer_model

BUCKET = Bucket(max_decodes=2, max_prefills=1, max_prefill_tokens=8, max_blocks=3)
BLOCK_SIZE = 4


def failing_step(params, caches):
    raise RuntimeError("this step fails")


@pytest.fixture(scope="module")
def model():
    model = one_layer_model()
    assert isinstance(model, Decoder)
    return model


def run(model, processes=None, files=None):
    """Run a prompt with an engine's step and return the logits and the caches."""
    graphdef, state = nnx.split(model)
    graphs = DecodeGraphs(ModelStep(graphdef), [BUCKET], from_host=True)
    caches = model.create_caches(5, block_size=BLOCK_SIZE)
    tokens = np.arange(BUCKET.max_tokens, dtype=np.int32)
    inputs = ModelInputs(
        token_ids=tokens,
        source_rows=np.full(BUCKET.max_tokens, -1, np.int32),
        last_tokens=jnp.zeros(2, jnp.int32),
        logits_indices=np.asarray([6, 0], np.int32),
    )
    graphs.precompile(
        state,
        caches,
        block_size=BLOCK_SIZE,
        inputs=lambda bucket: [inputs],
        progress=False,
        processes=processes,
        files=files,
    )
    graphs.wait()
    metadata = build_batch_metadata([5], [5], [[1, 2]], bucket=BUCKET, block_size=BLOCK_SIZE, to_device=False)
    (logits, _, _), caches = graphs(state, caches, metadata, inputs)
    assert graphs.num_compiles == 1
    return jax.tree.map(np.asarray, (logits, caches))


def no_process(**_):
    pytest.fail("A step that has a file starts no process.")


@pytest.mark.kernels
class TestFiles:
    def test_a_step_lowered_elsewhere_gives_the_same_results_and_is_read_from_its_file(
        self, model, tmp_path, monkeypatch
    ):
        expected = run(model)
        files = ExecutableFiles(tmp_path)
        jax.tree.map(np.testing.assert_array_equal, run(model, LoweringProcesses(1), files), expected)
        files.wait()
        (file,) = (tmp_path / FOLDER).iterdir()
        with monkeypatch.context() as patch:
            patch.setattr(lowering, "_start", no_process)
            found = run(model, LoweringProcesses(1), ExecutableFiles(tmp_path))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        file.write_bytes(file.read_bytes()[:-1])
        files = ExecutableFiles(tmp_path)
        with pytest.warns(UserWarning, match="is damaged and will be replaced"):
            found = run(model, LoweringProcesses(1), files)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        files.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(model, LoweringProcesses(1), ExecutableFiles(tmp_path))


def lower(processes, step):
    """Return the module of a step with one parameter and no caches; None if this process must lower it."""
    parameter = jax.ShapeDtypeStruct((2,), jnp.float32)
    pickled = PickledStep.of(AbstractStep(step, parameter, (), from_host=False))
    return None if pickled is None else processes.lower(pickled.request(()))


class TestStepsThatThisProcessMustLower:
    @pytest.mark.kernels
    @pytest.mark.parametrize(
        ("step", "reason"),
        [(lambda *_: None, "pickle"), (failing_step, "RuntimeError: this step fails")],
        ids=["unpicklable", "failing"],
    )
    def test_there_is_no_module_and_the_reason_is_logged(self, step, reason, caplog):
        with caplog.at_level("INFO", logger=lowering.__name__):
            assert lower(LoweringProcesses(1), step) is None
        assert reason in caplog.text

    def test_a_process_that_ends_leaves_the_steps_to_this_one(self, caplog, monkeypatch):
        command = [sys.executable, "-c", "import sys; sys.stdin.buffer.read(1)"]
        started = lambda **_: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        monkeypatch.setattr(lowering, "_start", started)
        processes = LoweringProcesses(1)
        with caplog.at_level("INFO", logger=lowering.__name__):
            assert lower(processes, failing_step) is None
            assert lower(processes, failing_step) is None
        assert caplog.text.count("there is no lowering process") == 2

    @pytest.mark.kernels
    def test_processes_end_with_the_cache(self, monkeypatch):
        process = lowering._start(is_urgent=True)
        monkeypatch.setattr(lowering, "_start", lambda **_: process)
        processes = LoweringProcesses(1)
        lower(processes, failing_step)
        assert process.poll() is None
        del processes
        gc.collect()
        assert process.poll() is not None
