"""Fixtures of the command-line tests: a recording engine, a server, and stdin."""

import io
import sys

import pytest

from jattn.serving.cli import options
from jattn.serving.engine.engine import Engine
from tests.serving.engine.test_engine import one_bucket
from tests.serving.server.live_server import run_server
from tests.serving.tiny import one_layer_model

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


class RecordingEngine:
    """Small engine, made once, which records the arguments that a command passes to Engine and `generate`."""

    def __init__(self, engine):
        self.engine, self.calls, self.options = engine, [], {}

    def __call__(self, model, **options):
        self.options = options
        return self

    def generate(self, *args, **kwargs):
        self.calls.append(kwargs)
        self.results = self.engine.generate(*args, **kwargs)
        return self.results

    @property
    def stats(self):
        return self.engine.stats

    @property
    def default_sampling_params(self):
        return self.engine.default_sampling_params


@pytest.fixture(scope="module")
def small_engine():
    return Engine(one_layer_model(), **one_bucket(2, 16, 17))


@pytest.fixture
def recording_engine(small_engine, monkeypatch):
    engine = RecordingEngine(small_engine)
    monkeypatch.setattr(options, "Engine", engine)
    return engine


@pytest.fixture(scope="module")
def chat_template_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(CHAT_TEMPLATE)
    return file


@pytest.fixture(scope="module")
def server(engine, chat_template_file):
    with run_server(engine, chat_template=chat_template_file, api_keys=("secret",)) as server:
        yield server


@pytest.fixture
def set_stdin(monkeypatch):
    """Return a function that sets the text on stdin."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))
