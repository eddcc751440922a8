"""Several processes run one engine: process 0 leads, and none outlives the failure of another for long."""

import json
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
from jattn.serving.engine.config import model_options
from jattn.serving.engine.processes import make_process_group, require_same_options
from jattn.serving.engine.step import ColdExecutable, WarmupRuns
from tests.serving.engine.process_requests import SIZES, request_results, scales_of, speculative_results
from tests.serving.tiny import one_layer_model
from tests.subprocesses import ROOT, free_port, run_processes

MODEL = {"num_attention_heads": 8, "num_key_value_heads": 2}  # on four, each held twice
SECONDS = 20.0  # time in which all processes must end after a failure; JAX's own timeout takes 100 s and more
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
    save(one_layer_model(**MODEL, hidden_act="gelu"), folder / "draft")
    return folder


def run_two(folder, scenario):
    """Return the exit codes, stdout lines and stderr of both processes."""
    port = free_port()
    return run_processes(
        ["tests.serving.engine.two_process_engine", str(port), str(rank), str(folder), scenario]
        for rank in range(2)
    )


def last_json(lines):
    return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


@pytest.mark.kernels
class TestTwoProcesses:
    def test_two_processes_generate_the_tokens_of_one_device(self, folder):
        (code, lines, error), (other_code, other_lines, other_error) = run_two(folder, "serve")
        assert (code, other_code) == (0, 0), error + other_error
        alone = request_results(Engine(load(folder, progress=False), **SIZES))
        answers, draft_results = [json.loads(line) for line in lines if line.startswith("{")]
        # Of 2^19 and 2^20 bytes a device; with a kv head of two on each, it has half of what one device has.
        sized = Engine(load(folder, progress=False), **SIZES | {"num_blocks": None, "cache_bytes": 2**20})
        assert answers["num_blocks"] == sized.stats.num_blocks
        assert answers["found"] == answers["again"] == alone
        assert {token for result in answers["zeros"] for tokens in result for token in tokens} == {0}
        assert "Only process 0 runs requests. Call engine.follow() in process 1." in other_lines
        assert other_lines[-1] == "followed"
        scales = [
            json.loads(next(filter(lambda line: line[0] == "[", variant))) for variant in (lines, other_lines)
        ]
        assert scales[0] == scales[1]
        np.testing.assert_allclose(scales[0], scales_of(load(folder, progress=False)), rtol=1e-5)
        draft_state = Engine(load(folder, progress=False), **SIZES | {"speculative": folder / "draft"})
        assert draft_results == speculative_results(draft_state)
        num_drafts, num_accepted = draft_results["drafts"]
        assert 0 < num_accepted < num_drafts

    @pytest.mark.slow
    def test_two_processes_generate_the_same_tokens_with_context_parallelism(self, folder):
        (code, lines, error), (other_code, other_lines, other_error) = run_two(folder, "keys")
        assert (code, other_code) == (0, 0), error + other_error
        assert last_json(lines) == speculative_results(Engine(load(folder, progress=False), **SIZES))
        assert other_lines[-1] == "followed"

    def test_two_processes_must_have_equal_options(self, folder):
        (code, _, error), (other_code, _, other_error) = run_two(folder, "unlike")
        assert code != 0
        assert other_code != 0
        rule = "The engine's options differ between processes: max_num_seqs 2 and 3; "
        assert rule in error
        assert rule in other_error
        assert "dtype float32 and bfloat16" in error

    @pytest.mark.parametrize(
        "scenario",
        [
            pytest.param("leader fails", marks=pytest.mark.slow),
            "leader fails in a step",
            pytest.param("follower fails", marks=pytest.mark.slow),
            "follower is killed",
        ],
    )
    def test_two_processes_end_with_the_error_of_the_failed_one(self, folder, scenario):
        ends = run_two(folder, scenario)
        ended_at = time.time()
        message = SAID.get(scenario, "it has had enough")
        options_per_model = ends[:1] if scenario == "follower is killed" else ends
        assert all(code != 0 for code, *_ in ends), ends
        assert all(message in error for *_, error in options_per_model), ends
        assert ended_at - last_json([line for _, lines, _ in ends for line in lines])["failed_at"] < SECONDS


def tokens_of_peers(platform):
    """Return tokens by heads and by keys with peer memory, and of one device."""
    port = str(free_port())
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process has a GPU's memory
    if platform == "gpu":
        environment["JAX_PLATFORMS"] = "cuda,cpu"  # parameters of a mesh are made on the host
    module = "tests.serving.engine.two_process_peer_memory"
    (code, lines, error), (other_code, _, other_error) = run_processes(
        [[module, port, str(rank), platform] for rank in range(2)], environment
    )
    assert (code, other_code) == (0, 0), error + other_error
    return last_json(lines)


@pytest.mark.kernels
def test_two_processes_all_reduce_in_peer_memory():
    tokens_by_setting = tokens_of_peers("cpu")
    assert len(tokens_by_setting) == 3
    assert all(tokens == tokens_by_setting["alone"] for tokens in tokens_by_setting.values()), (
        tokens_by_setting
    )


@pytest.mark.gpu
@pytest.mark.gpus
def test_two_gpu_processes_all_reduce_in_peer_memory():
    if len(jax.devices()) < 2:
        pytest.skip("one GPU")
    tokens_by_setting = tokens_of_peers("gpu")
    assert len(tokens_by_setting) == 3
    assert all(tokens == tokens_by_setting["alone"] for tokens in tokens_by_setting.values()), (
        tokens_by_setting
    )


@pytest.mark.kernels
class TestNodesOfTheCommandLine:
    COMMAND = ("jattn.serving.cli.main", "generate", "def f(", "--max-tokens", "6")
    SIZES = ("--max-num-seqs", "1", "--num-blocks", "9", "--max-model-len", "64")

    def run(self, folder, *options):
        nodes = ["--nnodes", "2", "--master-port", str(free_port())]
        return run_processes(
            [*self.COMMAND, "--model", str(folder), *self.SIZES, *options, *nodes, "--node-rank", str(rank)]
            for rank in range(2)
        )

    def test_only_process_0_prints_the_text(self, folder, capsys):
        (code, lines, error), (other_code, other_lines, other_error) = self.run(
            folder, "--tensor-parallel-size", "2"
        )
        assert (code, other_code) == (0, 0), error + other_error
        assert main([*self.COMMAND[1:], "--model", str(folder), *self.SIZES]) == 0
        assert lines == capsys.readouterr().out.splitlines()
        assert len("".join(lines)) > len("def f(")
        assert other_lines == []
        assert "jattn: node 1 of 2 follows node 0" in other_error

    def test_mesh_must_contain_the_devices_of_all_nodes(self, folder):
        for code, _, error in self.run(folder, "--tensor-parallel-size", "3"):
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
    engine.close()  # has no effect


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
    def test_different_models_are_rejected_with_the_difference(self, folder, change, message):
        models = [load_shapes(folder, **{"mesh": self.MESH} | variant) for variant in ({}, change, {})]
        with pytest.raises(
            ValueError, match=rf"The engine's options differ between processes: {message}\. Pass the same"
        ):
            require_same_options([model_options(model) for model in models])

    def test_optional_parts_of_some_processes_are_reported(self, folder):
        models = [load_shapes(folder, mesh=self.MESH) for _ in range(2)]
        models[0].peers = ()
        with pytest.raises(ValueError, match="draft model's peer memory True and False"):
            require_same_options([model_options(model, "a draft model's ") for model in models])

    def test_different_scales_are_reported(self, folder):
        models = [load_shapes(folder, mesh=self.MESH) for _ in range(4)]
        for model, scale in zip(models[:3], (0.5, 0.5, 0.25), strict=True):
            model.kv_scales = KVScales((LayerScales(np.float32(scale), np.ones(2, np.float32)),))
        options_per_model = [model_options(model) for model in models]
        require_same_options(options_per_model[:2])
        with pytest.raises(ValueError, match=r"processes: kv_scales sha256 \w+ and sha256 \w+ and None"):
            require_same_options(options_per_model)

    def test_other_configs_are_other_models(self, folder):
        options_per_model = [
            model_options(load_shapes(variant, mesh=self.MESH))
            for variant in (folder, folder / "draft", folder)
        ]
        require_same_options([options_per_model[0], options_per_model[2], {}])
        with pytest.raises(
            ValueError, match=r"processes: config of 320 tokens, 512 positions, sha256 \w+ and of"
        ):
            require_same_options(options_per_model)


class FakeProcesses:
    """Stand-in for Processes of a leader without followers."""

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


@pytest.mark.parametrize("operation", ["run", "warm_up", "read"])
class TestFailuresOfProcess0:
    def failing(self, runner, operation, error, monkeypatch, elsewhere=None):
        """Return the error sent to the followers if a step fails with `error`."""

        def fails(*_):
            raise error

        followers = FakeProcesses(elsewhere)
        inputs = types.SimpleNamespace(block_copies=[(1, 2)], sliding_window_copies=())
        monkeypatch.setattr(runner, "_processes", followers)
        monkeypatch.setattr(runner, "_copies", fails)
        monkeypatch.setattr(WarmupRuns, "run", fails)
        monkeypatch.setattr(jax, "device_get", fails)
        runs = {
            "run": lambda: runner.run(inputs),
            "warm_up": lambda: runner.warm_up([ColdExecutable(0, runner.graphs.buckets[0])]),
            "read": lambda: runner.read(None),
        }
        with pytest.raises(type(error)):
            runs[operation]()
        return followers.failed

    def test_failure_is_sent_to_followers_that_started_the_call(
        self, runner, operation, monkeypatch, types_unchecked
    ):
        error = MemoryError("here alone")
        assert self.failing(runner, operation, error, monkeypatch) == [error]

    def test_failure_caused_by_a_follower_is_not_sent(self, runner, operation, monkeypatch, types_unchecked):
        error = ConnectionError("by peer")
        assert self.failing(runner, operation, error, monkeypatch, "process 1 failed") == []

    def test_interrupted_read_is_not_a_failure(self, runner, operation, monkeypatch, types_unchecked):
        error = KeyboardInterrupt()
        assert self.failing(runner, operation, error, monkeypatch) == ([] if operation == "read" else [error])


class TestMeshProcesses:
    def test_single_process_has_no_process_group(self):
        assert make_process_group(make_mesh()) is None

    def test_each_must_have_devices_of_the_mesh(self, monkeypatch):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        rule = r"mesh has devices of the processes \[0\] only, but there are 2 processes\."
        with pytest.raises(ValueError, match=rule):
            make_process_group(make_mesh())
