"""The sampling parameters of a checkpoint's generation_config.json are the defaults of requests."""

import asyncio
import json
import shutil

import pytest

from jattn.models import load, save
from jattn.models.loading.pretrained import load_shapes, read_config
from jattn.serving import AsyncEngine, Engine, SamplingParams
from jattn.serving.cli.main import main
from jattn.serving.server.sampling_params import default_sampling
from tests.conftest import GOLDEN
from tests.serving.engine.test_engine import one_bucket
from tests.serving.tiny import BYTES

LLAMA3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [5, 7], "max_length": 4096}


@pytest.fixture
def folder(tmp_path):
    """Return a function that creates a checkpoint with this generation_config.json, or without one for
    None.
    """

    def make(content):
        shutil.copytree(GOLDEN / "hf" / "llama3", tmp_path, dirs_exist_ok=True)
        (tmp_path / "generation_config.json").unlink()
        if content is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(content))
        return tmp_path

    return make


def engine_of(folder):
    return Engine(load(folder, progress=False), **one_bucket(2, 16, 17))


@pytest.mark.parametrize(
    ("content", "params"),
    [
        (None, {}),
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),  # as in transformers: without do_sample they do not count
        ({"do_sample": False, "top_k": 50, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        (LLAMA3, {"temperature": 0.6, "top_p": 0.9}),
        (
            {"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.05, "temperature": 0.7},
            {"min_p": 0.1, "repetition_penalty": 1.05, "temperature": 0.7},
        ),
    ],
)
def test_a_checkpoint_with_do_sample_sets_the_defaults(folder, content, params):
    directory = folder(content)
    assert Engine(load_shapes(directory), num_blocks=9).default_sampling_params == SamplingParams(**params)


def test_requests_without_parameters_use_the_defaults(folder):
    engine = engine_of(folder(LLAMA3 | {"temperature": 50.0, "eos_token_id": [5, 7]}))
    prompt = [[1, 2, 3]]
    greedy = engine.generate(prompt, SamplingParams(), ignore_eos=True)[0].token_ids
    default_tokens = engine.generate(prompt, SamplingParams(), ignore_eos=True)[0].token_ids
    drawn = [engine.generate(prompt, ignore_eos=True)[0].token_ids for _ in range(2)]
    assert greedy == default_tokens
    assert greedy not in drawn
    assert drawn[0] != drawn[1]
    seeded = SamplingParams(temperature=50.0, top_p=0.9, seed=1)
    assert engine.generate(prompt, seeded)[0].token_ids == engine.generate(prompt, seeded)[0].token_ids
    name = engine.add_request(prompt[0])
    assert engine._open[name][0].params.temperature == 50.0
    engine.abort(name)


@pytest.mark.kernels
def test_an_async_engine_uses_the_defaults(folder):
    engine = engine_of(folder({"do_sample": True, "temperature": 1.0, "top_k": 1}))
    requested, add = [], engine.add_request

    def recorded(prompt, params, name):
        requested.append(params)
        return add(prompt, params, name)

    engine.add_request = recorded

    async def run():
        async with AsyncEngine(engine) as served:
            return [output async for output in served.generate([1, 2])]

    assert asyncio.run(run())[-1].finish_reason is not None
    assert requested == [engine.default_sampling_params]


def test_every_eos_token_ends_a_text(folder):
    assert read_config(folder(LLAMA3)).eos_token_ids == (5, 7)


def test_the_defaults_are_saved_with_a_model(folder, tmp_path):
    model = load(folder(LLAMA3), progress=False)
    save(model, tmp_path / "again")
    assert load(tmp_path / "again", progress=False).generation_config == model.generation_config
    model.generation_config = "{}"
    save(model, tmp_path / "silent")
    assert not (tmp_path / "silent" / "generation_config.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"do_sample": True, "top_k": -2}, r"generation_config.json: top_k must be at least 0 .*, got -2"),
        (
            {"do_sample": True, "top_p": 1.5},
            r"generation_config.json: top_p must be in \(0, 1\] .*, got 1.5\.",
        ),
        (
            {"repetition_penalty": 0},
            r"generation_config.json: repetition_penalty must be in .*, got 0\.",
        ),
    ],
)
def test_invalid_generation_configs_are_rejected(folder, content, message):
    directory = folder(content)
    with pytest.raises(ValueError, match=message):
        Engine(load_shapes(directory), num_blocks=9)


OFF = {"top_p": 1.0, "top_k": None, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    ("content", "params"),
    [
        (None, {"temperature": 1.0}),
        ({"temperature": 0.3, "top_k": 3}, {"temperature": 1.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 1.0, "repetition_penalty": 1.1}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (LLAMA3, {"temperature": 0.6, "top_p": 0.9}),
    ],
)
def test_a_server_uses_the_engines_defaults_and_openais_temperature_if_greedy(folder, content, params):
    engine = Engine(load_shapes(folder(content)), num_blocks=9)
    assert default_sampling(engine.default_sampling_params) == OFF | params


class TestCommandLine:
    @pytest.fixture
    def requested_params(self, monkeypatch):
        """Record the sampling parameters that the command line passes to the engine."""
        requested, generate = [], Engine.generate

        def recorded(self, *args, **options):
            requested.append(options["sampling_params"])
            return generate(self, *args, **options)

        monkeypatch.setattr(Engine, "generate", recorded)
        return requested

    @pytest.mark.kernels
    def test_reports_the_checkpoints_parameters_and_uses_them_as_defaults(
        self, folder, requested_params, capsys
    ):
        directory = folder(LLAMA3)
        (directory / "tokenizer.json").write_text(BYTES.to_str())
        model = ["generate", "--model", str(directory), "--max-tokens", "1", "--max-model-len", "32"]
        assert main([*model, "--top-k", "4", "a"]) == 0
        assert requested_params == [SamplingParams(temperature=0.6, top_p=0.9, top_k=4)]
        err = capsys.readouterr().err
        assert "jattn: using the model's default sampling parameters: temperature 0.6, top_p 0.9." in err
