"""Several processes run one engine: process 0 says what, and none outlives another's failure for long."""

import collections
import json
import os
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jattn.models import KVScales, load, save
from jattn.models.kv_scales import LayerScales
from jattn.models.loading.pretrained import load_shapes
from jattn.parallel import make_mesh
from jattn.serving import Engine
from jattn.serving.cli.main import main
from jattn.serving.engine.engine_setup import model_options
from jattn.serving.engine.processes import make_process_group, require_same_options
from jattn.serving.engine.warmup import ColdExecutable, WarmupRuns
from tests.serving.engine.process_requests import SIZES, asked, drafted, scales_of
from tests.serving.tiny import one_layer_model
from tests.subprocesses import ROOT, free_port, run_processes

MODEL = {"num_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}  # on four, each held twice
SECONDS = 20.0  # behind a failure, in which all must have ended; what jax itself watches takes 100 and more
SAID = {
    "leader fails in a step": "process 0 failed: JaxRuntimeError: INTERNAL: the device fell over",
    "follower is killed": "process 1 ended without an error message",
}
BY_AN_ERROR = """
import atexit, multiprocessing, time
from jattn.serving.engine import processes
atexit.register(time.sleep, 60)  # as jax.distributed, which waits for all
processes._connect, processes.GRACE_S = lambda: {1: connection}, 0.1
connection, other = multiprocessing.Pipe()
processes.ProcessGroup()
raise RuntimeError("it has had enough")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(one_layer_model(**MODEL), folder)
    save(one_layer_model(**MODEL | {"num_layers": 1}), folder / "draft")
    return folder


def run_two(folder, what):
    """Exit code, lines of stdout and stderr of both processes."""
    port = free_port()
    return run_processes(
        ["tests.serving.engine.two_process_engine", str(port), str(rank), str(folder), what]
        for rank in range(2)
    )


def last_json(lines):
    return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


@pytest.mark.kernels
class TestTwoProcesses:
    def test_generate_the_tokens_of_one_device(self, folder):
        (code, lines, error), (other_code, other_lines, other_error) = run_two(folder, "serve")
        assert (code, other_code) == (0, 0), error + other_error
        alone = asked(Engine(load(folder, progress=False), **SIZES))
        answers, of_drafts = [json.loads(line) for line in lines if line.startswith("{")]
        # Of 2^19 and 2^20 bytes a device; with a kv head of two on each, it has half of what one device has.
        sized = Engine(load(folder, progress=False), **SIZES | {"num_blocks": None, "cache_bytes": 2**20})
        assert answers["num_blocks"] == sized.stats.num_blocks
        assert answers["found"] == answers["again"] == alone
        assert {token for result in answers["zeros"] for tokens in result for token in tokens} == {0}
        assert "Only process 0 runs requests. Call engine.follow() in process 1." in other_lines
        assert other_lines[-1] == "followed"
        scales = [json.loads(next(filter(lambda line: line[0] == "[", of))) for of in (lines, other_lines)]
        assert scales[0] == scales[1]
        np.testing.assert_allclose(scales[0], scales_of(load(folder, progress=False)), rtol=1e-5)
        draft_state = Engine(load(folder, progress=False), **SIZES | {"speculative": folder / "draft"})
        assert of_drafts == drafted(draft_state)
        num_drafts, num_accepted = of_drafts["drafts"]
        assert 0 < num_accepted < num_drafts

    @pytest.mark.slow
    def test_generate_the_same_tokens_with_context_parallelism(self, folder):
        (code, lines, error), (other_code, other_lines, other_error) = run_two(folder, "keys")
        assert (code, other_code) == (0, 0), error + other_error
        assert last_json(lines) == drafted(Engine(load(folder, progress=False), **SIZES))
        assert other_lines[-1] == "followed"

    def test_must_have_equal_options(self, folder):
        (code, _, error), (other_code, _, other_error) = run_two(folder, "unlike")
        assert code != 0
        assert other_code != 0
        rule = "The engine's options differ between processes: max_num_seqs 2 and 3; "
        assert rule in error
        assert rule in other_error
        assert "dtype float32 and bfloat16" in error

    @pytest.mark.parametrize(
        "what",
        [
            pytest.param("leader fails", marks=pytest.mark.slow),
            "leader fails in a step",
            "follower fails",
            "follower is killed",
        ],
    )
    def test_end_with_the_error_of_the_failed_process(self, folder, what):
        ends = run_two(folder, what)
        ended_at = time.time()
        said = SAID.get(what, "it has had enough")
        told = ends[:1] if what == "follower is killed" else ends
        assert all(code != 0 for code, *_ in ends), ends
        assert all(said in error for *_, error in told), ends
        assert ended_at - last_json([line for _, lines, _ in ends for line in lines])["failed_at"] < SECONDS


def tokens_of_peers(where):
    """By heads and by keys, with peer memory and without, and of one device."""
    port = str(free_port())
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process has a GPU's memory
    if where == "gpu":
        environment["JAX_PLATFORMS"] = "cuda,cpu"  # parameters of a mesh are made on the host
    module = "tests.serving.engine.two_process_peer_memory"
    (code, lines, error), (other_code, _, other_error) = run_processes(
        [[module, port, str(rank), where] for rank in range(2)], environment
    )
    assert (code, other_code) == (0, 0), error + other_error
    return last_json(lines)


@pytest.mark.kernels
def test_two_processes_all_reduce_in_peer_memory():
    found = tokens_of_peers("cpu")
    assert len(found) == 4
    assert all(tokens == found["alone"] for tokens in found.values()), found


@pytest.mark.gpu
@pytest.mark.gpus
def test_two_gpu_processes_all_reduce_in_peer_memory():
    if len(jax.devices()) < 2:
        pytest.skip("one GPU")
    found = tokens_of_peers("gpu")
    assert len(found) == 4
    assert all(tokens == found["alone"] for tokens in found.values()), found


@pytest.mark.kernels
class TestNodesOfTheCommandLine:
    COMMAND = ("jattn.serving.cli.main", "generate", "def f(", "--max-tokens", "6")
    SIZES = ("--model", "examples/tiny_model", "--max-num-seqs", "1", "--num-blocks", "9")

    def run(self, *options):
        nodes = ["--nnodes", "2", "--master-port", str(free_port())]
        return run_processes(
            [*self.COMMAND, *self.SIZES, *options, *nodes, "--node-rank", str(rank)] for rank in range(2)
        )

    def test_write_one_process_s_text(self, capsys):
        (code, lines, error), (other_code, other_lines, other_error) = self.run("--tensor-parallel-size", "2")
        assert (code, other_code) == (0, 0), error + other_error
        assert main([*self.COMMAND[1:], *self.SIZES]) == 0
        assert lines == capsys.readouterr().out.splitlines()
        assert other_lines == []
        assert "jattn: node 1 of 2 follows node 0" in other_error

    def test_are_all_devices(self):
        for code, _, error in self.run("--tensor-parallel-size", "3"):
            assert code == 1
            assert (
                "--tensor-parallel-size must be the total number of devices of the 2 nodes (2), got 3."
                in error
            )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes=0"], "nnodes must be positive, got 0."),
        (["--nnodes=2", "--node-rank=2"], "--node-rank must be in [0, 1] with --nnodes 2, got 2."),
        (["--node-rank=-1"], "--node-rank must be in [0, 0] with --nnodes 1, got -1."),
        (["--nnodes=2"], "--tensor-parallel-size must be the total number of devices of the 2 nodes, got 1."),
    ],
)
def test_invalid_nodes_are_refused_before_waiting(options, message, capsys):
    assert main(["generate", "--model", "DIR", "a", *options]) == 1
    assert message in capsys.readouterr().err


def test_a_single_process_cannot_follow():
    engine = Engine(one_layer_model(), num_blocks=9, max_num_seqs=2)
    with pytest.raises(ValueError, match=r"Process 0 cannot call follow\(\)\. It requires a mesh"):
        engine.follow()
    engine.close()  # does nothing


@pytest.mark.kernels
def test_a_failed_process_does_not_wait_for_the_others():
    done = subprocess.run(
        [sys.executable, "-c", BY_AN_ERROR], capture_output=True, text=True, timeout=50, cwd=ROOT
    )
    assert done.returncode == 1
    assert "jattn: process 0 failed: RuntimeError: it has had enough; this process ends." in done.stderr


class TestRequireAlike:
    MESH = Mesh(np.array([jax.devices()[0]] * 2).reshape(1, 2), ("tp", "cp"))  # for checks alone

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"dtype": "bfloat16"}, "dtype float32 and bfloat16"),
            ({"cp_kv_cache_interleave_size": 2}, "cp_kv_cache_interleave_size 1 and 2"),
            ({"mesh": make_mesh()}, r"mesh {'tp': 1, 'cp': 2} of devices \[0, 0\] and {'tp': 1, 'cp': 1} .*"),
        ],
    )
    def test_names_what_differs_between_models(self, folder, change, message):
        models = [load_shapes(folder, **{"mesh": self.MESH} | of) for of in ({}, change, {})]
        with pytest.raises(
            ValueError, match=rf"The engine's options differ between processes: {message}\. Pass the same"
        ):
            require_same_options([model_options(model) for model in models])

    def test_names_what_only_some_have(self, folder):
        models = [load_shapes(folder, mesh=self.MESH) for _ in range(2)]
        models[0].peers = ()
        with pytest.raises(ValueError, match="draft model's peer memory True and False"):
            require_same_options([model_options(model, "a draft model's ") for model in models])

    def test_names_scales_of_other_numbers(self, folder):
        models = [load_shapes(folder, mesh=self.MESH) for _ in range(4)]
        for model, scale in zip(models[:3], (0.5, 0.5, 0.25), strict=True):
            model.kv_scales = KVScales((LayerScales(np.float32(scale), np.ones(2, np.float32)),) * 2)
        told = [model_options(model) for model in models]
        require_same_options(told[:2])
        with pytest.raises(ValueError, match=r"processes: kv_scales sha256 \w+ and sha256 \w+ and None"):
            require_same_options(told)

    def test_takes_another_config_for_another_model(self, folder):
        told = [model_options(load_shapes(of, mesh=self.MESH)) for of in (folder, folder / "draft", folder)]
        require_same_options([told[0], told[2], {}])
        with pytest.raises(
            ValueError, match=r"processes: config of 320 tokens, 512 positions, sha256 \w+ and of"
        ):
            require_same_options(told)


class StandIn:
    """Of Processes that this one leads; nobody listens."""

    is_leader = True

    def __init__(self, elsewhere=None):
        self.elsewhere, self.failed = elsewhere, []

    def send(self, *_):
        pass

    def remote_failure(self):
        return self.elsewhere

    def fail(self, error):
        self.failed.append(error)


@pytest.fixture(scope="module")
def runner():
    engine = Engine(one_layer_model(), num_blocks=9, max_num_seqs=2, max_num_batched_tokens=16)
    return engine._runner


@pytest.mark.parametrize("what", ["start", "warm_up", "read"])
class TestWhatProcess0FailsIn:
    def failing(self, runner, what, error, monkeypatch, elsewhere=None):
        """What the others are told where it fails with the error."""

        def fails(*_):
            raise error

        others, call = StandIn(elsewhere), types.SimpleNamespace(to_host=lambda: call, with_last_tokens=fails)
        monkeypatch.setattr(runner, "_processes", others)
        monkeypatch.setattr(runner, "_in_flight", collections.deque([None]))
        monkeypatch.setattr(WarmupRuns, "run", fails)
        monkeypatch.setattr("jattn.serving.engine.runner.read_new_tokens", fails)
        runs = {
            "start": lambda: runner.start(call, object()),
            "warm_up": lambda: runner.warm_up([ColdExecutable(0, runner.graphs.buckets[0])]),
            "read": lambda: list(runner.read()),
        }
        with pytest.raises(type(error)):
            runs[what]()
        return others.failed

    def test_is_told_to_those_who_have_begun_it(self, runner, what, monkeypatch, types_unchecked):
        error = MemoryError("here alone")
        assert self.failing(runner, what, error, monkeypatch) == [error]

    def test_is_not_told_where_another_s_failure_is_why(self, runner, what, monkeypatch, types_unchecked):
        error = ConnectionError("by peer")
        assert self.failing(runner, what, error, monkeypatch, "process 1 failed") == []

    def test_is_nothing_where_a_reading_is_interrupted(self, runner, what, monkeypatch, types_unchecked):
        error = KeyboardInterrupt()
        assert self.failing(runner, what, error, monkeypatch) == ([] if what == "read" else [error])


class TestProcessesOf:
    def test_are_none_where_there_is_one(self):
        assert make_process_group(None) is None
        assert make_process_group(make_mesh()) is None

    def test_each_must_have_devices_of_the_mesh(self, monkeypatch):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        rule = r"mesh has devices of the processes \[0\] only, but there are 2 processes\."
        with pytest.raises(ValueError, match=rule):
            make_process_group(make_mesh())
