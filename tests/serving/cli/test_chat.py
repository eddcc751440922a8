"""`jattn chat` with a server and with a local model."""

import sys

import pytest

from jattn.models import save
from jattn.serving.cli import chat, options
from jattn.serving.cli.main import main
from tests.serving.cli.conftest import CHAT_TEMPLATE
from tests.serving.tiny import BYTES, one_layer_model


class TestChat:
    WORDS = ("chat", "--max-tokens=5", "--temperature=0.7", "--seed=3")

    @pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])  # `jattn serve` prints its URL with /v1.
    def test_replies_of_a_server(self, server, set_stdin, capsys, end):
        set_stdin("hi\nmore\n")
        assert main([*self.WORDS, f"--url={server.url}{end}", "--api-key=secret", "--system=be kind"]) == 0
        messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
        expected = ""
        for line in ("more", None):
            body = {"messages": messages, "max_tokens": 5, "temperature": 0.7, "seed": 3}
            headers = {"Authorization": "Bearer secret"}
            _, _, response = server.request("POST", "/v1/chat/completions", body, headers)
            text = response["choices"][0]["message"]["content"]
            expected += text + "\n"
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": line}]
        assert capsys.readouterr().out == expected

    def test_replies_of_a_local_model(self, engine, set_stdin, capsys, tmp_path, monkeypatch):
        save(one_layer_model(), tmp_path)
        BYTES.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        monkeypatch.setattr(options, "Engine", lambda model, **_: engine)
        set_stdin("hi\n")
        assert main([*self.WORDS, f"--model={tmp_path}"]) == 0
        params = chat.SamplingParams(max_tokens=5, temperature=0.7, seed=3)
        (result,) = engine.generate(["<user>hi"], params)
        assert capsys.readouterr().out == result.text + "\n"

    @pytest.mark.parametrize(
        ("template", "line", "message"),
        [
            (CHAT_TEMPLATE, "h\udcff\n", "messages must be valid Unicode text, got '<user>h\\udcff'"),
            (
                "{{ raise_exception('no system') }}",
                "hi\n",
                "The chat template rejected the messages: no system",
            ),
            ("{{ messages[0].content + 1 }}", "hi\n", "The chat template rejected the messages: TypeError: "),
        ],
    )
    def test_error_of_the_template_or_tokenizer_is_one_line(
        self, engine, set_stdin, capsys, tmp_path, monkeypatch, template, line, message
    ):
        save(one_layer_model(), tmp_path)
        (tmp_path / "chat_template.jinja").write_text(template)
        monkeypatch.setattr(options, "Engine", lambda model, **_: engine)
        set_stdin(line)
        assert main([*self.WORDS, f"--model={tmp_path}"]) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"jattn: {message}")
        assert err.count("\n") == 1

    def test_ctrl_c_ends_the_reply_and_not_the_conversation(self, set_stdin, capsys, monkeypatch):
        def stream_reply(messages):
            yield "begun"
            if len(messages) == 1:
                raise KeyboardInterrupt
            yield " ended"

        monkeypatch.setattr(chat, "_remote_model", lambda args: stream_reply)
        set_stdin("a\nb\n")
        assert main([*self.WORDS, "--url=http://x"]) == 0
        assert capsys.readouterr().out == "begun\nbegun ended\n"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "Pass --model NAME to load a model, or --url URL to use a server."),
            (["--model=/no/such"], "/no/such is not a folder, nor a name on the Hub such as org/name."),
            (["--url=http://x:99999"], "--url must have the form http://HOST:PORT, got http://x:99999"),
            (["--url=ftp://x"], "--url must have the form http://HOST:PORT, got ftp://x"),
            (["--url=http://127.0.0.1:1"], "Connect call failed"),
            (
                ["--url=http://x", "--kv-cache-dtype=fp8"],
                "--kv-cache-dtype cannot be combined with --url; set it on the server.",
            ),
            (["--url=http://x", "--skip-layers=0"], "--skip-layers cannot be combined with --url"),
            (["--url=http://x", "--chat-template=a"], "--chat-template cannot be combined with --url"),
            (["--model=DIR", "--api-key=a"], "--api-key requires --url."),
            (
                ["--model=examples/tiny_model"],
                "examples/tiny_model has no chat template. Pass --chat-template FILE.",
            ),
        ],
    )
    def test_invalid_call_is_an_error_of_one_line(self, set_stdin, capsys, words, message):
        set_stdin("hi\n")
        assert main([*self.WORDS, *words]) == 1
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1

    def test_invalid_url_is_reported_before_the_conversation(self, set_stdin, capsys):
        set_stdin("")
        assert main([*self.WORDS, "--url=nonsense"]) == 1
        assert capsys.readouterr().err == "jattn: --url must have the form http://HOST:PORT, got nonsense.\n"

    def test_error_of_the_server_is_printed(self, server, set_stdin, capsys):
        set_stdin("hi\n")
        assert main([*self.WORDS, f"--url={server.url}", "--api-key=wrong"]) == 1
        assert "jattn: HTTP 401: Invalid API key." in capsys.readouterr().err


def test_missing_extra_names_the_command_that_installs_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jattn.serving.server.chat_template", None)
    assert main(["chat", "--model=m"]) == 1
    assert "of the extra 'serve': pip install '.[serve]' in a checkout" in capsys.readouterr().err
