"""Routes, authentication, CORS and the small endpoints."""

import logging
import re

import openai
import pytest

from tests.serving.server.live_server import run_server

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


USER = {"role": "user", "content": "hi"}


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


class TestOtherEndpoints:
    def test_models_endpoint_lists_the_model(self, server):
        status, _, response = server.request("GET", "/v1/models")
        assert (status, response["object"]) == (200, "list")
        assert [model["id"] for model in response["data"]] == ["tiny", "alias"]
        assert server.request("GET", "/v1/models/alias")[2]["max_model_len"] == 512
        assert server.request("GET", "/v1/models/other")[0] == 404
        assert server.post("/v1/completions", model="alias", prompt="a", max_tokens=1)["model"] == "tiny"

    def test_health_and_version_respond(self, server):
        assert server.request("GET", "/health")[0] == 200
        assert server.request("GET", "/version")[2] == {"version": "0.1.0"}

    def test_tokenize_and_detokenize_are_inverse(self, server):
        response = server.post("/tokenize", prompt="añ", return_token_strs=True)
        assert response["count"] == len(response["tokens"]) == len(response["token_strs"]) == 3
        assert response["max_model_len"] == 512
        assert server.post("/detokenize", tokens=response["tokens"]) == {"prompt": "añ"}

    def test_probes_and_scrapes_are_not_logged(self, server):
        log, handler, lines = logging.getLogger("uvicorn.access"), logging.Handler(), []
        handler.emit = lambda record: lines.append(record.getMessage())
        level = log.level
        log.setLevel("INFO")
        log.addHandler(handler)
        for path in ("/health", "/ping?x=1", "/v1/models", "/metrics"):
            server.request("GET", path)
        log.removeHandler(handler)
        log.setLevel(level)
        (line,) = lines
        assert line.endswith('"GET /v1/models HTTP/1.1" 200')

    def test_ping_load_and_reset_prefix_cache_respond(self, server):
        assert server.request("GET", "/ping")[0] == server.request("POST", "/ping")[0] == 200
        assert server.request("GET", "/load")[2] == {"server_load": 0}
        long, stats = "0123456789" * 5, server.engine.stats
        hits = lambda: server.engine.stats.num_prefix_hit_tokens
        server.post(TEXT, prompt=long, max_tokens=1)
        before = hits()
        server.post(TEXT, prompt=long, max_tokens=1)
        assert hits() > before
        assert server.request("POST", "/reset_prefix_cache")[0] == 200
        before = hits()
        server.post(TEXT, prompt=long, max_tokens=1)
        assert hits() == before, stats

    def test_models_path_may_end_with_a_slash(self, server):
        assert server.request("GET", "/v1/models/")[2] == server.request("GET", "/v1/models")[2]

    def test_unknown_path_is_an_openai_not_found_error(self, server):
        status, _, response = server.request("POST", "/v1/responses", {"input": "hi"})
        assert (status, response["error"]["type"]) == (404, "not_found_error")
        assert re.search(r"Invalid URL \(POST /v1/responses\)", response["error"]["message"])
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError, match="Invalid URL"):
                client.responses.create(model="tiny", input="hi")
            assert client.models.retrieve(client.models.list().data[0].id).object == "model"


class TestApiKeys:
    def test_request_needs_a_valid_key(self, engine):
        with run_server(engine, api_keys=("secret", "other")) as server:
            wrong = ("Bearer wrong", "secret", "Basic secret", "Bearersecret", "Bearer", "bearer ")
            for headers in ({}, *({"Authorization": header} for header in wrong)):
                for path in (TEXT, "/v1/models", "/tokenize", "/version"):
                    status, response_headers, response = server.request(
                        "POST", path, {"prompt": "a"}, headers
                    )
                    assert (status, response_headers["WWW-Authenticate"]) == (401, "Bearer")
                    assert response["error"]["code"] == "invalid_api_key"
            for header in ("Bearer secret", "Bearer other", "bearer secret", "BEARER other"):
                headers = {"Authorization": header}
                assert server.request("GET", "/v1/models", headers=headers)[0] == 200
            assert [server.request("GET", path)[0] for path in ("/health", "/metrics")] == [200, 200]


class TestCors:
    """Requests of pages from other origins, which browsers precede with a preflight request."""

    PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}  # noqa: RUF012

    def test_cors_is_disabled_by_default(self, server):
        status, headers, _ = server.request("OPTIONS", CHAT, headers=self.PREFLIGHT)
        assert (status, headers["access-control-allow-origin"]) == (405, None)

    @pytest.mark.parametrize("allowed", ["https://a.example", "*"])
    def test_allowed_origin_needs_a_key_except_for_preflight(self, engine, allowed):
        with run_server(engine, allowed_origins=(allowed,), api_keys=("k",)) as server:
            preflight = self.PREFLIGHT | {"Access-Control-Request-Headers": "authorization,content-type"}
            status, headers, _ = server.request("OPTIONS", CHAT, headers=preflight)
            assert (status, headers["access-control-allow-origin"]) == (200, allowed)
            status, headers, _ = server.request("GET", "/v1/models", headers=self.PREFLIGHT)
            assert (status, headers["access-control-allow-origin"]) == (401, allowed)
            key = {"Authorization": "Bearer k"}
            assert server.request("GET", "/v1/models", headers=self.PREFLIGHT | key)[0] == 200
