"""`jattn serve`: options, startup, signals and exit status."""

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
from jattn.serving.cli.parser import normalize_options
from jattn.serving.cli.serve import expand_config
from jattn.serving.engine.sampling_params import MAX_LOGPROBS
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
    """A running `jattn serve` process."""

    def __init__(self, *words):
        command = [sys.executable, "-m", "jattn.serving.cli.main", "serve", *words]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.first_line = self.popen.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.first_line)
        assert match, self.popen.communicate()
        self.port = int(match[1])

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body and json.dumps(body))
            response = connection.getresponse()
            data = response.read()
            return response.status, json.loads(data) if data else None

    def end(self, sig):
        """Send a signal and return the exit status and stderr."""
        self.popen.send_signal(sig)
        _, err = self.popen.communicate(timeout=60)
        return self.popen.returncode, err


@pytest.mark.kernels
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_server_exits_with_0_on_a_signal(folder, tmp_path, sig):
    config = tmp_path / "serve.yaml"
    config.write_text("port: 0\nmax_queue: 7\nserved-model-name: [first, second]\n")
    process = Process(f"--model={folder}", f"--config={config}", *SIZES)
    try:
        assert process.first_line.startswith("Serving first at http://127.0.0.1:")
        assert "no API key is required" in process.first_line
        while process.request("GET", "/health")[0] == 503:
            assert process.popen.poll() is None
            time.sleep(0.1)
        status, response = process.request("POST", "/v1/completions", {"prompt": "abc", "max_tokens": 3})
        assert (status, response["model"], response["usage"]["completion_tokens"]) == (200, "first", 3)
        code, err = process.end(sig)
    finally:
        process.popen.kill()
        process.popen.communicate()
    assert code == 0, err
    assert "Traceback" not in err
    assert "could not be compiled" not in err


@pytest.mark.kernels
def test_http_process_ends_if_the_engine_process_is_killed(folder):
    process = Process(f"--model={folder}", "--port=0", *SIZES)
    pid = process.popen.pid
    (http_pid,) = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    process.popen.kill()
    process.popen.communicate(timeout=60)  # Until the HTTP process has closed the shared stderr, too.
    end = time.monotonic() + 10
    while pathlib.Path(f"/proc/{http_pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


class TestSignals:
    def test_second_signal_ends_a_process_that_waits_for_a_compilation(self, types_unchecked, monkeypatch):
        calls = []
        http = type("Http", (), {"has_ended": False, "signal": lambda self, number: calls.append(number)})()
        monkeypatch.setattr(signal, "signal", lambda number, handler: calls.append((number, handler)))
        monkeypatch.setattr(signal, "raise_signal", lambda number: calls.append("raised"))
        launcher.forward_signal(http, signal.SIGINT)
        assert calls == [signal.SIGINT]
        http.has_ended = True
        launcher.forward_signal(http, signal.SIGINT)
        assert calls[1:3] == [(signal.SIGINT, signal.SIG_DFL), "raised"]

    def test_signal_during_exit_raises_no_exception(self, folder, monkeypatch):
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
def test_printed_url_is_valid_for_ipv4_and_ipv6(types_unchecked, address, url):
    sock = type("Listening", (), {"getsockname": lambda self: address})()
    assert launcher.base_url(sock) == url
    assert urllib.parse.urlsplit(url).port == 80


class TestOptions:
    def test_command_line_wins_over_the_config_file(self, tmp_path):
        config = tmp_path / "serve.yaml"
        config.write_text(
            "model: DIR\nport: 1\nmax-queue: 3\napi-key: [a, b]\nenable_prefix_caching: false\n"
        )
        words = expand_config(["serve", "--config", str(config), "--port=2"])
        args = build_parser().parse_args(words)
        assert (args.model, args.port, args.max_queue, args.api_key) == ("DIR", 2, 3, ["a", "b"])
        assert args.enable_prefix_caching is False
        assert expand_config(["generate", "--config"]) == ["generate", "--config"]

    def test_list_on_the_command_line_replaces_the_files(self, tmp_path):
        config = tmp_path / "serve.yaml"
        config.write_text(
            "model: DIR\nskip-layers: [0, -1]\nallowed-origins: [a, b]\nserved_model_name: [c, d]\n"
        )

        def parse(*words):
            return build_parser().parse_args(expand_config(["serve", f"--config={config}", *words]))

        args = parse()
        assert (args.skip_layers, args.allowed_origins) == ([0, -1], ["a", "b"])
        assert args.served_model_name == ["c", "d"]
        args = parse("--skip-layers=1,2", "--allowed-origins", "e", "f", "--served-model-name=g")
        assert (args.skip_layers, args.allowed_origins) == ([1, 2], ["e", "f"])
        assert args.served_model_name == ["g"]
        assert build_parser().parse_args(["serve", "--model=DIR"]).skip_layers == []

    def test_switches_in_a_config_file_are_true_or_false(self, tmp_path):
        config = tmp_path / "serve.yaml"
        config.write_text(
            "batch-invariant: false\ndisable_custom_all_reduce: true\ncascade-attention: false\n"
        )
        args = build_parser().parse_args(expand_config(["serve", f"--config={config}", "--model=DIR"]))
        switches = args.batch_invariant, args.disable_custom_all_reduce, args.cascade_attention
        assert switches == (False, True, False)

    def test_unknown_option_in_a_config_file_is_an_error(self, tmp_path, capsys):
        config = tmp_path / "serve.yaml"
        config.write_text("nope: 1\nport: 2")
        with pytest.raises(SystemExit, match="2"):
            main(["serve", "--config", str(config)])
        assert "unrecognized arguments: --nope=1" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("- a", r"serve.yaml must map option names to values, got \['a'\]"),
            ("a: b: c", "serve.yaml is not valid YAML: mapping values are not allowed here in .*, line 1"),
            ("\udcff", r"serve.yaml is not valid YAML: 'utf-8' codec can't decode byte 0xff"),
            (
                "port: {a: 1}",
                r"config: port must be a string, a number, true, false or a list, got \{'a': 1\}",
            ),
        ],
    )
    def test_invalid_config_file_is_an_error_of_one_line(self, tmp_path, capsys, text, message):
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
            (["--max-model-len=4x"], "argument --max-model-len: must be a number of tokens such as 4096, 4k"),
            (["--dtype=int3"], "argument --dtype: invalid choice: 'int3'"),
            (["--config"], "argument --config: expected one argument"),
            (["--model=m", "--prot=1"], "unrecognized arguments: --prot=1. See"),
            (
                ["m", "--quantization", "fp8"],
                "unrecognized arguments: --quantization fp8 (--quantization is a vLLM option; in jattn, the "
                "quantization of weights is read from the checkpoint; for the KV cache, use --kv-cache-dtype",
            ),
        ],
    )
    def test_unknown_or_malformed_option_is_an_error_of_one_line(self, capsys, words, message):
        with pytest.raises(SystemExit, match="2"):
            main(["serve", *words])
        err = capsys.readouterr().err
        assert err.startswith(f"jattn serve: {message}")
        assert err.endswith(". See jattn serve --help.\n")
        assert err.count("\n") == 1

    def test_switches_of_vllm_without_effect_are_accepted_with_a_notice(self, tmp_path, capsys):
        config = tmp_path / "serve.yaml"
        config.write_text("enable-auto-tool-choice: true\n")
        words = ["missing", "--async-scheduling", "--trust-remote-code", "--port=0", f"--config={config}"]
        assert main(["serve", *words]) == 1
        first, notice, second, error = capsys.readouterr().err.splitlines()
        assert first.startswith("jattn: --enable-auto-tool-choice has no effect: automatic tool choice")
        assert notice.startswith("jattn: --async-scheduling has no effect: a step is always prepared")
        assert second.startswith("jattn: --trust-remote-code has no effect: code in checkpoints is never run")
        assert "missing" in error

    @pytest.mark.parametrize(
        ("words", "notice"),
        [
            (["--disable-log-stats"], "--disable-log-stats has no effect: statistics are not logged"),
            (["-pp", "1"], "--pipeline-parallel-size=1 has no effect: every device runs all layers"),
            (["-dp=1"], "--data-parallel-size=1 has no effect: one server is one replica"),
            (["--data_parallel_size", "1"], "--data-parallel-size=1 has no effect"),
        ],
    )
    def test_sizes_of_one_and_disabled_logs_are_accepted_with_a_notice(self, capsys, words, notice):
        assert main(["serve", *words, "missing", "--port=0"]) == 1
        first, error = capsys.readouterr().err.splitlines()
        assert first.startswith(f"jattn: {notice}")
        assert error.startswith("jattn: missing is not a folder")

    def test_missing_config_file_is_an_error(self, capsys):
        assert main(["serve", "--config", "no/such.yaml"]) == 1
        assert "no/such.yaml" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--port=99999"], r"port must be in \[0, 65535\], got 99999"),
            (["--api-key="], r"api_keys must not contain an empty key"),
            (["--chat-template=no/such.jinja"], "chat_template no/such.jinja is not a file"),
        ],
    )
    def test_invalid_value_is_an_error_of_one_line(self, folder, capsys, words, message):
        assert main(["serve", f"--model={folder}", *SIZES, *words]) == 1
        err = capsys.readouterr().err
        assert re.search(message, err)
        assert err.count("\n") == 1

    def test_port_in_use_is_an_error(self, folder, capsys):

        with socket.create_server(("127.0.0.1", 0)) as sock:
            assert main(["serve", f"--model={folder}", *SIZES, f"--port={sock.getsockname()[1]}"]) == 1
        assert "in use" in capsys.readouterr().err

    @pytest.mark.kernels
    def test_invalid_chat_template_is_an_error(self, folder, tmp_path, capsys):
        template = tmp_path / "template.jinja"
        template.write_text("a\n{% if %}")
        assert main(["serve", f"--model={folder}", *SIZES, "--port=0", f"--chat-template={template}"]) == 1
        err = capsys.readouterr().err
        assert re.search("chat_template is not a valid Jinja template: line 2: Expected", err)

    @pytest.mark.kernels
    def test_model_without_tokenizer_is_an_error(self, capsys):
        assert main(["serve", f"--model={GOLDEN / 'hf' / 'llama'}", *SIZES, "--port=0"]) == 1
        assert "The model folder has no tokenizer.json" in capsys.readouterr().err

    def test_missing_extra_names_the_command_that_installs_it(self, folder, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "jattn.serving.server", None)
        assert main(["serve", f"--model={folder}"]) == 1
        assert "of the extra 'serve': pip install '.[serve]' in a checkout" in capsys.readouterr().err

    def test_model_is_required(self, capsys):
        assert main(["serve"]) == 1
        assert capsys.readouterr().err.startswith("jattn: No model given. Pass MODEL: a folder, or a name on")

    @pytest.mark.parametrize(
        "words", [["missing"], ["--model=missing"], ["--model", "missing"], ["missing", "--model=missing"]]
    )
    def test_model_is_positional_or_an_option(self, capsys, words):
        assert main(["serve", *words, "--port=0"]) == 1
        assert capsys.readouterr().err.startswith("jattn: missing is not a folder")

    @pytest.mark.parametrize("words", [["a", "--model=b"], ["--model=a", "b"]])
    def test_two_different_models_are_an_error(self, capsys, words):
        with pytest.raises(SystemExit, match="2"):
            main(["serve", *words])
        message = "jattn serve: got two models, a and b; pass one of them. See jattn serve --help.\n"
        assert capsys.readouterr().err == message

    @pytest.mark.parametrize("words", [["other"], ["--model=other"]])
    def test_model_on_the_command_line_replaces_the_files(self, tmp_path, words):
        config = tmp_path / "serve.yaml"
        config.write_text("model: DIR\nport: 1\n")
        args = build_parser().parse_args(expand_config(["serve", f"--config={config}", *words]))
        assert (args.model, args.port) == ("other", 1)

    @pytest.mark.parametrize(("text", "length"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("-1", None)])
    def test_maximum_context_length_has_the_spellings_of_vllm(self, text, length):
        assert build_parser().parse_args(["serve", "m", "--max-model-len", text]).max_model_len == length

    def test_options_have_the_spellings_of_vllm(self):
        words = ["m", "--max_num_seqs=3", "--kv_cache_dtype", "fp8", "-tp", "2", "-dcp", "1", "--dtype=half"]
        words += ["--load_format=dummy", "--seed=7", "--api-key=a_b", "--served-model-name", "--", "c_d"]
        args, unknown = build_parser(["serve"]).parse_known_args(normalize_options(["serve", *words[:-3]]))
        assert not unknown
        assert (args.model, args.max_num_seqs, args.kv_cache_dtype) == ("m", 3, "fp8")
        assert (args.tensor_parallel_size, args.decode_context_parallel_size, args.dtype) == (2, 1, "half")
        assert (args.load_format, args.seed, args.api_key) == ("dummy", 7, ["a_b"])
        assert normalize_options(words)[-2:] == ["--", "c_d"]

    @pytest.mark.parametrize(
        ("words", "hint"),
        [
            (["--enable-lora"], "in jattn, LoRA is not supported"),
            (["--swap_space", "4"], "preempted requests are recomputed, not swapped to the host"),
            (["--enable-expert-parallel"], "use --tensor-parallel-size, which shards every expert"),
            (["--no-enable-chunked-prefill"], "chunked prefill is always enabled"),
            (["--kv-cache-memory-bytes=100"], "set the size of the cache with --num-blocks"),
            (["--num-gpu-blocks-override=9"], "in jattn, use --num-blocks"),
            (["-pp", "2"], "--pipeline-parallel-size is a vLLM option; in jattn, use --tensor-parallel-size"),
            (["-dp", "2"], "in jattn, start one server per replica"),
            (["--hf-overrides", "{}"], "edit config.json in the model folder"),
            (["--compilation-config=3"], "every step is compiled, and there are no compilation options"),
            (["--max-logprobs=5"], f"the maximum is always {MAX_LOGPROBS}"),
            (["--uvicorn-log-level=error"], "the level is always info"),
        ],
    )
    def test_options_of_vllm_that_are_refused_have_a_hint_of_one_line(self, capsys, words, hint):
        with pytest.raises(SystemExit, match="2"):
            main(["serve", "m", *words])
        err = capsys.readouterr().err
        assert hint in err
        assert err.count("\n") == 1
