"""Several processes run one engine: process 0 says what, and none outlives another's failure for long."""

import json
import pathlib
import socket
import subprocess
import sys
import time
import types

import jax
import pytest

from jattn.models import load, save
from jattn.parallel import make_mesh
from jattn.serving import Engine
from jattn.serving.processes import processes_of
from jattn.serving.speculative import as_drafter
from tests.serving.requests_of_processes import SIZES, asked
from tests.serving.tiny import one_layer_model

ROOT = pathlib.Path(__file__).parents[2]
MODEL = {"num_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}  # on four, each held twice
SECONDS = 20.0  # behind a failure, in which all must have ended; what jax itself watches takes 100 and more


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(one_layer_model(**MODEL), folder)
    return folder


def run_two(folder, what):
    """Exit code, lines of stdout and stderr of both processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.serving.several_processes", str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    both = [subprocess.Popen([*command, str(rank), str(folder), what], **pipes) for rank in range(2)]
    try:
        done = [process.communicate(timeout=240) for process in both]
    finally:
        for process in both:
            process.kill()
    return [(one.returncode, out.splitlines(), err) for one, (out, err) in zip(both, done, strict=True)]


def last_json(lines):
    return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


@pytest.mark.kernels
class TestTwoProcesses:
    def test_get_one_device_s_tokens(self, folder):
        (code, lines, error), (other_code, other_lines, other_error) = run_two(folder, "serve")
        assert (code, other_code) == (0, 0), error + other_error
        alone = asked(Engine(load(folder, progress=False), **SIZES))
        answers = last_json(lines)
        # Of 2^19 and 2^20 bytes a device; with a kv head of two on each, it has half of what one device has.
        sized = Engine(load(folder, progress=False), **SIZES | {"num_blocks": None, "cache_bytes": 2**20})
        assert answers["num_blocks"] == sized.stats.num_blocks
        assert answers["found"] == answers["again"] == alone
        assert {token for result in answers["zeros"] for tokens in result for token in tokens} == {0}
        assert "the process must be 0 (the others call engine.follow()), got 1." in other_lines
        assert other_lines[-1] == "followed"

    def test_must_be_made_alike(self, folder):
        (code, _, error), (other_code, _, other_error) = run_two(folder, "unlike")
        assert code != 0
        assert other_code != 0
        assert "the engine must be made alike on all processes" in error
        assert "max_num_seqs=3" in error + other_error

    @pytest.mark.parametrize(
        "what", [pytest.param("leader fails", marks=pytest.mark.slow), "follower fails", "follower is killed"]
    )
    def test_end_with_the_error_of_the_one_that_failed(self, folder, what):
        ends = run_two(folder, what)
        ended_at = time.time()
        said = "process 1 ended without a word" if what == "follower is killed" else "it has had enough"
        told = ends[:1] if what == "follower is killed" else ends
        assert all(code != 0 for code, *_ in ends), ends
        assert all(said in error for *_, error in told), ends
        assert ended_at - last_json([line for _, lines, _ in ends for line in lines])["failed_at"] < SECONDS


def test_one_process_follows_nobody():
    engine = Engine(one_layer_model(), num_blocks=9, max_num_seqs=2)
    with pytest.raises(ValueError, match=r"follow\(\)'s process must be one of several .*, got 0\."):
        engine.follow()
    engine.close()  # does nothing


class TestProcessesOf:
    def test_are_none_where_there_is_one(self):
        assert processes_of(None) is None
        assert processes_of(make_mesh()) is None

    def test_each_must_have_devices_of_the_mesh(self, monkeypatch):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        rule = r"mesh must have devices of all 2 processes .*, got those of \[0\]"
        with pytest.raises(ValueError, match=rule):
            processes_of(make_mesh())

    def test_have_no_draft_model_whose_folder_is_not_even_looked_at(self, monkeypatch, types_unchecked):
        model = types.SimpleNamespace(mesh=make_mesh())
        limits = types.SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=2)
        with pytest.raises(FileNotFoundError):
            as_drafter("no/such/folder", 2, model, limits)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(NotImplementedError, match="a draft model with several processes"):
            as_drafter("no/such/folder", 2, model, limits)
