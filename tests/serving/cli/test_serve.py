"""`jattn serve` as a process: from its first line to its last."""

import contextlib
import http.client
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse

import pytest

from jattn.models import save
from jattn.serving.cli.main import build_parser, main
from jattn.serving.cli.serve import with_config
from jattn.serving.server import launcher
from tests.conftest import GOLDEN
from tests.serving.tiny import BYTES, one_layer_model

SIZES = ["--num-blocks=33", "--max-num-seqs=2", "--max-num-batched-tokens=16", "--max-model-len=64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "small"
    save(one_layer_model(), folder)
    BYTES.save(str(folder / "tokenizer.json"))
    return folder


class Process:
    """`jattn serve` under way."""

    def __init__(self, *words):
        command = [sys.executable, "-m", "jattn.serving.cli.main", "serve", *words]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.first_line = self.popen.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.first_line)
        assert found, self.popen.communicate()
        self.port = int(found[1])

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body and json.dumps(body))
            answer = connection.getresponse()
            data = answer.read()
            return answer.status, json.loads(data) if data else None

    def end(self, sig):
        """(exit status, what it wrote on stderr)."""
        self.popen.send_signal(sig)
        _, err = self.popen.communicate(timeout=60)
        return self.popen.returncode, err


@pytest.mark.kernels
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_stop_and_exits_with_0(folder, tmp_path, sig):
    config = tmp_path / "serve.yaml"
    config.write_text("port: 0\nmax_queue: 7\nserved-model-name: [given, other]\n")
    process = Process(f"--model={folder}", f"--config={config}", *SIZES)
    try:
        assert process.first_line.startswith("Serving given at http://127.0.0.1:")
        assert "without an API key" in process.first_line
        while process.ask("GET", "/health")[0] == 503:
            assert process.popen.poll() is None
            time.sleep(0.1)
        status, answer = process.ask("POST", "/v1/completions", {"prompt": "abc", "max_tokens": 3})
        assert (status, answer["model"], answer["usage"]["completion_tokens"]) == (200, "given", 3)
        code, err = process.end(sig)
    finally:
        process.popen.kill()
        process.popen.communicate()
    assert code == 0, err
    assert "Traceback" not in err


@pytest.mark.kernels
def test_its_process_of_http_ends_where_the_engine_s_was_killed(folder):
    process = Process(f"--model={folder}", "--port=0", *SIZES)
    pid = process.popen.pid
    (http_pid,) = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    process.popen.kill()
    process.popen.communicate(timeout=10)  # until nobody has its standard error any more
    end = time.monotonic() + 10
    while pathlib.Path(f"/proc/{http_pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


class TestSignals:
    def test_one_behind_the_first_ends_what_only_waits_for_the_engine(self, types_unchecked, monkeypatch):
        done = []
        http = type("Http", (), {"has_ended": False, "signal": lambda self, number: done.append(number)})()
        monkeypatch.setattr(signal, "signal", lambda number, handler: done.append((number, handler)))
        monkeypatch.setattr(signal, "raise_signal", lambda number: done.append("raised"))
        launcher.stop(http, signal.SIGINT)
        assert done == [signal.SIGINT]
        http.has_ended = True
        launcher.stop(http, signal.SIGINT)
        assert done[1:3] == [(signal.SIGINT, signal.SIG_DFL), "raised"]

    def test_one_at_the_very_end_of_the_process_is_no_exception(self, folder, monkeypatch):
        before = signal.getsignal(signal.SIGINT)
        monkeypatch.setattr("jattn.serving.server.serve", lambda *_: None)
        try:
            assert main(["serve", f"--model={folder}", "--port=0"]) == 0
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        finally:
            signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("address", "url"),
    [(("127.0.0.1", 80), "http://127.0.0.1:80"), (("::1", 80, 0, 0), "http://[::1]:80")],
)
def test_its_url_is_one_that_clients_take(types_unchecked, address, url):
    sock = type("Listening", (), {"getsockname": lambda self: address})()
    assert launcher.url_of(sock) == url
    assert urllib.parse.urlsplit(url).port == 80


class TestOptions:
    def test_those_of_a_file_stand_before_those_typed(self, tmp_path):
        config = tmp_path / "serve.yaml"
        config.write_text(
            "model: DIR\nport: 1\nmax-queue: 3\napi-key: [a, b]\nenable_prefix_caching: false\n"
        )
        words = with_config(["serve", "--config", str(config), "--port=2"])
        args = build_parser().parse_args(words)
        assert (args.model, args.port, args.max_queue, args.api_key) == ("DIR", 2, 3, ["a", "b"])
        assert args.enable_prefix_caching is False
        assert with_config(["generate", "--config"]) == ["generate", "--config"]

    def test_lists_of_a_file_are_whole_unless_typed(self, tmp_path):
        config = tmp_path / "serve.yaml"
        config.write_text(
            "model: DIR\nskip-layers: [0, -1]\nallowed-origins: [a, b]\nserved_model_name: [c, d]\n"
        )
        told = lambda *words: build_parser().parse_args(with_config(["serve", f"--config={config}", *words]))
        args = told()
        assert (args.skip_layers, args.allowed_origins) == ([0, -1], ["a", "b"])
        assert args.served_model_name == ["c", "d"]
        args = told("--skip-layers=1,2", "--allowed-origins", "e", "f", "--served-model-name=g")
        assert (args.skip_layers, args.allowed_origins) == ([1, 2], ["e", "f"])
        assert args.served_model_name == ["g"]
        assert build_parser().parse_args(["serve", "--model=DIR"]).skip_layers == []

    def test_switches_of_a_file_are_on_or_off(self, tmp_path):
        config = tmp_path / "serve.yaml"
        config.write_text(
            "batch-invariant: false\ndisable_custom_all_reduce: true\ncascade-attention: false\n"
        )
        args = build_parser().parse_args(with_config(["serve", f"--config={config}", "--model=DIR"]))
        switches = args.batch_invariant, args.disable_custom_all_reduce, args.cascade_attention
        assert switches == (False, True, False)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("- a", r"config must hold options by their names, got \['a'\]"),
            ("a: b: c", "config must be YAML, got mapping values are not allowed here, in line 1"),
            ("\udcff", r"config must be YAML, got 'utf-8' codec can't decode byte 0xff"),
            ("nope: 1\nport: 2", r"config must hold options of jattn serve, got \['--nope=1'\]"),
            ("nope: false", r"config must hold options of jattn serve, got \['--no-nope'\]"),
            ("config: other.yaml", r"config must hold options of jattn serve, got \['--config=other.yaml'\]"),
            ("port: {a: 1}", r"config: port must be a value or a list, got \{'a': 1\}"),
        ],
    )
    def test_a_file_that_holds_none_is_an_error(self, tmp_path, capsys, text, message):
        config = tmp_path / "serve.yaml"
        config.write_bytes(text.encode(errors="surrogateescape"))
        assert main(["serve", "--config", str(config)]) == 1
        err = capsys.readouterr().err
        assert re.search(message, err)
        assert err.count("\n") == 1

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--port=abc"], "argument --port: invalid int value: 'abc'"),
            (["--dtype=int3"], "argument --dtype: invalid choice: 'int3'"),
            (["--config"], "argument --config: expected one argument"),
            ([], "the following arguments are required: --model"),
            (["--model=m", "--prot=1"], "unrecognized arguments: --prot=1. See"),
            (
                ["--model=m", "--kv-cache-dtype", "fp8"],
                "unrecognized arguments: --kv-cache-dtype fp8 (--kv-cache-dtype is vLLM's: here it is --quan",
            ),
        ],
    )
    def test_that_are_none_are_one_line(self, capsys, words, message):
        with pytest.raises(SystemExit, match="2"):
            main(["serve", *words])
        err = capsys.readouterr().err
        assert err.startswith(f"jattn serve: {message}")
        assert err.endswith(". See jattn serve --help.\n")
        assert err.count("\n") == 1

    def test_a_file_that_is_not_there_is_an_error(self, capsys):
        assert main(["serve", "--config", "no/such.yaml"]) == 1
        assert "no/such.yaml" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--port=99999"], r"port must be in \[0, 65536\), got 99999"),
            (["--api-key="], r"api_keys must hold no empty key, got \(''"),
            (["--served-model-name="], r"served_model_names must hold no empty name, got \(''"),
            (["--max-queue=-1"], "max_queue must be at least 0, got -1"),
            (["--drain-seconds=-1"], "drain_seconds must be at least 0, got -1"),
            (["--model=no/such/folder"], "no/such/folder"),
            (["--chat-template=no/such.jinja"], "chat_template must be a file, got no/such.jinja"),
        ],
    )
    def test_that_are_wrong_are_one_line(self, folder, capsys, words, message):
        assert main(["serve", f"--model={folder}", *SIZES, *words]) == 1
        err = capsys.readouterr().err
        assert re.search(message, err)
        assert err.count("\n") == 1

    def test_a_port_that_is_taken_is_one_line(self, folder, capsys):

        with socket.create_server(("127.0.0.1", 0)) as sock:
            assert main(["serve", f"--model={folder}", *SIZES, f"--port={sock.getsockname()[1]}"]) == 1
        assert "in use" in capsys.readouterr().err

    def test_a_template_that_is_none_is_one_line(self, folder, tmp_path, capsys):
        template = tmp_path / "template.jinja"
        template.write_text("a\n{% if %}")
        assert main(["serve", f"--model={folder}", *SIZES, "--port=0", f"--chat-template={template}"]) == 1
        err = capsys.readouterr().err
        assert re.search("chat_template must be a Jinja2 template, got in line 2: Expected", err)

    def test_a_model_without_a_tokenizer_is_one_line(self, capsys):
        assert main(["serve", f"--model={GOLDEN / 'hf' / 'llama'}", *SIZES, "--port=0"]) == 1
        assert "model must have a tokenizer (tokenizer.json), got None" in capsys.readouterr().err

    def test_without_the_extra_it_says_what_to_install(self, folder, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "jattn.serving.server", None)
        assert main(["serve", f"--model={folder}"]) == 1
        assert "pip install '.[serve]' in a checkout" in capsys.readouterr().err
