"""Token names and text offsets."""

import pytest

from jattn.serving.server.logprobs import TokenFormatter
from tests.serving.server.live_server import run_server
from tests.serving.tiny import llama_tokenizer

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(CHATML)
    with run_server(engine, served_model_names=("tiny", "alias"), chat_template=file) as server:
        yield server


def test_token_id_names_reuse_the_formatter(server, monkeypatch):
    monkeypatch.setattr(TokenFormatter, "__init__", lambda *_: pytest.fail("looked at again"))
    request_body = {"prompt": "abc", "max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": True}
    (choice,) = server.post("/v1/completions", **request_body)["choices"]
    assert choice["logprobs"]["tokens"][0].startswith("token_id:")
    (choice,) = server.post("/v1/completions", **request_body | {"return_tokens_as_token_ids": False})[
        "choices"
    ]
    assert not choice["logprobs"]["tokens"][0].startswith("token_id:")


def test_text_offsets_exclude_an_added_bos():
    tokenizer = llama_tokenizer()
    hello, world = (tokenizer.token_to_id(f"\u2581{word}") for word in ("Hello", "world"))
    offsets = TokenFormatter(tokenizer).text_offsets([1, hello], skip_special_tokens=True)
    assert offsets.next_offsets([1, hello, world], "Hello") == [0, 0, 5]
    assert offsets.next_offsets([2, world]) == [11, 11]
