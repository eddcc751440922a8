"""`jattn chat` and `jattn bench-serve` against a server on this machine, and chat with a folder."""

import asyncio
import concurrent.futures
import contextlib
import io
import json
import random
import re
import socket
import sys
import time

import pytest

from jattn.models import save
from jattn.serving.cli import chat, main, options
from jattn.serving.cli.bench_serve import Sample, arriving, as_line, summary
from tests.serving.server.live_server import running
from tests.serving.tiny import BYTES, one_layer_model

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="module")
def server(engine, template):
    with running(engine, chat_template=template, api_keys=("secret",)) as server:
        yield server


@pytest.fixture
def says(monkeypatch):
    """Sets what stands on the input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@contextlib.contextmanager
def answering(data):
    """The url of a server that says this to one client, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as sock, concurrent.futures.ThreadPoolExecutor() as pool:

        def answer():
            client, _ = sock.accept()
            with client:
                client.recv(2**16)
                client.sendall(data)

        answered = pool.submit(answer)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        answered.result()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNK = (
    b'data: {"choices": [{"text": "a", "delta": {"content": "a"}}], "usage": {"completion_tokens": 1}}\n\n'
)
CUT_OFF = [
    (b"", "the server must speak HTTP, got b''"),
    (b"\x15\x03\x03\x00\x02", "the server must speak HTTP, got b'"),
    (b"SSH-2.0-OpenSSH_9.6 x\r\n", "the server must speak HTTP, got b'SSH"),
    (HEAD + CHUNK, "the server ended within its answer"),
]


@pytest.mark.parametrize(("data", "message"), CUT_OFF)
class TestCutOff:
    def test_an_answer_of_a_chat_is_an_error(self, says, capsys, data, message):
        says("hi\n")
        with answering(data) as url:
            assert main(["chat", f"--url={url}"]) == 1
        assert message in capsys.readouterr().err

    def test_an_answer_counts_as_failed_in_a_run(self, capsys, data, message):
        with answering(data) as url:
            assert main(["bench-serve", f"--url={url}", "--num-prompts=1", "--request-rate=100"]) == 1
        told = capsys.readouterr()
        assert message in told.out
        assert "no request was answered" in told.err


def test_comments_and_names_of_events_are_no_chunks(says, capsys):
    """As proxies send them to keep a connection open; the space behind "data:" may be missing, too."""
    stream = b": ping\n\n" + CHUNK + b"event: more\n" + CHUNK.replace(b"data: ", b"data:")
    says("hi\n")
    with answering(HEAD + stream + b"data: [DONE]\n\n") as url:
        assert main(["chat", f"--url={url}"]) == 0
    assert capsys.readouterr().out == "aa\n"


class TestChat:
    WORDS = ("chat", "--max-tokens=5", "--temperature=0.7", "--seed=3")

    @pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])  # as `jattn serve` prints it, too
    def test_with_a_server(self, server, says, capsys, end):
        says("hi\nmore\n")
        assert main([*self.WORDS, f"--url={server.url}{end}", "--api-key=secret", "--system=be kind"]) == 0
        messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
        wanted = ""
        for line in ("more", None):
            asked = {"messages": messages, "max_tokens": 5, "temperature": 0.7, "seed": 3}
            headers = {"Authorization": "Bearer secret"}
            _, _, answer = server.ask("POST", "/v1/chat/completions", asked, headers)
            text = answer["choices"][0]["message"]["content"]
            wanted += text + "\n"
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": line}]
        assert capsys.readouterr().out == wanted

    def test_with_a_folder(self, engine, says, capsys, tmp_path, template, monkeypatch):
        save(one_layer_model(), tmp_path)
        BYTES.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
        monkeypatch.setattr(options, "Engine", lambda model, **_: engine)
        says("hi\n")
        assert main([*self.WORDS, f"--model={tmp_path}"]) == 0
        params = chat.SamplingParams(max_tokens=5, temperature=0.7, seed=3)
        (want,) = engine.generate(["<user>hi"], params)
        assert capsys.readouterr().out == want.text + "\n"

    @pytest.mark.parametrize(
        ("source", "said", "message"),
        [
            (TEMPLATE, "h\udcff\n", "messages must be valid Unicode text, got '<user>h\\udcff'"),
            (
                "{{ raise_exception('no system') }}",
                "hi\n",
                "messages must fit the chat template, got no system",
            ),
            ("{{ messages[0].content + 1 }}", "hi\n", "messages must fit the chat template, got TypeError: "),
        ],
    )
    def test_what_a_folder_s_template_or_tokenizer_refuses_is_one_line(
        self, engine, says, capsys, tmp_path, monkeypatch, source, said, message
    ):
        save(one_layer_model(), tmp_path)
        (tmp_path / "chat_template.jinja").write_text(source)
        monkeypatch.setattr(options, "Engine", lambda model, **_: engine)
        says(said)
        assert main([*self.WORDS, f"--model={tmp_path}"]) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"jattn: {message}")
        assert err.count("\n") == 1

    def test_an_interrupt_ends_the_answer_and_not_the_conversation(self, says, capsys, monkeypatch):
        def speak(messages):
            yield "begun"
            if len(messages) == 1:
                raise KeyboardInterrupt
            yield " ended"

        monkeypatch.setattr(chat, "_of_server", lambda args: speak)
        says("a\nb\n")
        assert main([*self.WORDS, "--url=http://x"]) == 0
        assert capsys.readouterr().out == "begun\nbegun ended\n"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "model must be a folder, or url a server, got None"),
            (["--model=no/such"], "model must be a folder, got no/such"),
            (["--url=http://x:99999"], "url must be http://HOST:PORT, got http://x:99999"),
            (["--url=ftp://x"], "url must be http://HOST:PORT, got ftp://x"),
            (["--url=http://127.0.0.1:1"], "Connect call failed"),
            (
                ["--url=http://x", "--quantization=fp8"],
                "quantization must be left out with url: it is the server's, got fp8",
            ),
            (["--url=http://x", "--skip-layers=0"], "skip_layers must be left out with url: "),
            (["--url=http://x", "--chat-template=a"], "chat_template must be left out with url: "),
            (["--model=DIR", "--api-key=a"], "api_key must be left out without a server (--url), got one"),
            (
                ["--model=examples/tiny_model"],
                r"model must have a chat template (or give --chat-template FILE)",
            ),
        ],
    )
    def test_what_is_wrong_is_one_line(self, says, capsys, words, message):
        says("hi\n")
        assert main([*self.WORDS, *words]) == 1
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1

    def test_a_url_is_looked_at_before_anything_is_said(self, says, capsys):
        says("")
        assert main([*self.WORDS, "--url=nonsense"]) == 1
        assert capsys.readouterr().err == "jattn: url must be http://HOST:PORT, got nonsense.\n"

    def test_what_the_server_refuses_is_told(self, server, says, capsys):
        says("hi\n")
        assert main([*self.WORDS, f"--url={server.url}", "--api-key=wrong"]) == 1
        assert "jattn: 401: a request must have one of the server's API keys" in capsys.readouterr().err


class TestBench:
    def test_a_run_of_each_rate_is_printed_written_and_drawn(self, server, capsys, tmp_path):
        files = [f"--json={tmp_path / 'rows.json'}", f"--plot={tmp_path / 'plot.svg'}"]
        sizes = ["--num-prompts=6", "--input-len=20", "--output-len=9", "--request-rate", "50", "200"]
        words = ["bench-serve", f"--url={server.url}", "--api-key=secret", *files, *sizes]
        assert main(words) == 0
        rows = json.loads((tmp_path / "rows.json").read_text())
        assert [row["request_rate"] for row in rows] == [50, 200]
        for row in rows:
            assert (row["num_ok"], row["num_failed"], row["errors"]) == (6, 0, [])
            assert row["tokens_per_second"] == pytest.approx(54 / row["seconds"])
            for times in (row[f"{name}_ms"] for name in ("time_to_first_token", "end_to_end")):
                assert 0 < times["p50"] <= times["p90"] <= times["p99"]
        assert (tmp_path / "plot.svg").read_text().count("requests a second") > 0
        assert len(capsys.readouterr().out.splitlines()) == 2 + 2

    def test_all_at_once_is_a_rate_and_what_is_written_is_json(self, server, tmp_path):
        sizes = ["--num-prompts=2", "--input-len=3", "--output-len=2", "--request-rate", "inf"]
        file = tmp_path / "rows.json"
        assert main(["bench-serve", f"--url={server.url}", "--api-key=secret", f"--json={file}", *sizes]) == 0
        (row,) = json.loads(file.read_text(), parse_constant=pytest.fail)
        assert (row["request_rate"], row["num_ok"]) == ("inf", 2)

    def test_what_fails_is_counted_and_told(self, server, capsys, tmp_path):
        sizes = ["--num-prompts=2", "--input-len=20", "--output-len=9", "--request-rate=99"]
        file = tmp_path / "rows.json"
        assert main(["bench-serve", f"--url={server.url}", f"--json={file}", *sizes]) == 1
        out, err = capsys.readouterr()
        assert "401: a request must have one" in out
        assert err == "jattn: no request was answered.\n"
        (row,) = json.loads(file.read_text(), parse_constant=pytest.fail)  # NaN is no JSON
        assert row["end_to_end_ms"] == {"p50": None, "p90": None, "p99": None, "mean": None}

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--json=no/such/rows.json"], "no/such/rows.json"),
            (["--plot=no/such/rows.svg"], "no/such/rows.svg"),
            (["--plot=rows.nonsense"], "plot must end as one of .*svg.*, got rows.nonsense"),
            (["--url=http://x:99999"], "url must be http://HOST:PORT, got http://x:99999"),
        ],
    )
    def test_what_could_not_be_written_or_reached_is_told_before_the_run(self, capsys, words, message):
        assert main(["bench-serve", "--url=http://127.0.0.1:1", *words]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert re.search(message, err)

    def test_a_request_that_its_sender_is_late_with_has_waited(self):
        """All five are due at once, and each is held up by those before it for 20 ms."""

        async def ask(prompt, due):
            time.sleep(0.02)
            return Sample([time.perf_counter() - due])

        samples = asyncio.run(arriving(ask, [[1]] * 5, 1e9, random.Random(0)))
        firsts = [sample.arrivals[0] for sample in samples]
        assert firsts == sorted(firsts)
        assert firsts[-1] >= 5 * 0.02 - 1e-3

    def test_times_are_by_percentile(self):
        samples = [Sample([1.0, 1.5, 2.5], 3.0, 4), Sample([2.0], 2.0, 1), Sample(error="gone")]
        row = summary(samples, 1.0, 10.0)
        assert (row["num_ok"], row["num_failed"], row["tokens_per_second"]) == (2, 1, 0.5)
        assert row["time_to_first_token_ms"]["p50"] == 1500
        assert row["time_to_first_token_ms"]["mean"] == 1500
        assert row["inter_token_latency_ms"]["p50"] == 750
        assert as_line(row).endswith("\n  gone")

    def test_a_url_that_is_none_is_one_line(self, capsys):
        assert main(["bench-serve", "--url", "nonsense"]) == 1
        assert capsys.readouterr().err == "jattn: url must be http://HOST:PORT, got nonsense.\n"

    def test_each_rate_is_positive(self, capsys):
        assert main(["bench-serve", "--url=http://127.0.0.1:1", "--request-rate", "4", "nan"]) == 1
        assert "request_rate must be positive, got nan" in capsys.readouterr().err

    def test_sizes_are_positive(self, capsys):
        assert main(["bench-serve", "--num-prompts=0"]) == 1
        assert "num_prompts must be positive, got 0" in capsys.readouterr().err
