"""The examples run and print correct results."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from examples import (
    decode_one_step,
    demo,
    flax_train_then_serve,
    serve_a_batch,
    serve_with_graphs,
    serve_with_loop,
    sparsity_study,
)
from tests.assertions import assert_updates_in_place
from tests.serving.tiny import one_layer_model

pytestmark = pytest.mark.kernels
EXAMPLES = pathlib.Path(demo.__file__).parent


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Save a small model with a byte tokenizer and return its folder."""
    directory = tmp_path_factory.mktemp("model")
    jattn.models.save(one_layer_model(), directory)
    return str(directory)


def test_decode_one_step(capsys):
    decode_one_step.main()
    out = capsys.readouterr().out
    assert "slot of each new token: [38 10 28 29 30 31 12]" in out
    assert "position of each token: [6 2 0 1 2 3 4]" in out
    assert "first prompt token == its value: True" in out


def test_decode_one_step_updates_the_donated_cache_in_place():
    metadata = jattn.build_batch_metadata([1, 1, 5], [7, 3, 5], [[5, 9], [2], [7, 3]], block_size=4)
    rows = [jnp.ones((7, heads, 64)) for heads in (8, 2, 2)]
    assert_updates_in_place(
        decode_one_step.step, decode_one_step.CACHE_SPEC, lambda cache: (cache, metadata, *rows)
    )


@pytest.fixture(scope="module")
def trained():
    """Train a model to memorize a text; return it and its last loss."""
    model = flax_train_then_serve.Model(nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"):  # optax needs it.
        return model, flax_train_then_serve.train(model, flax_train_then_serve.TEXT, steps=100)


def test_trained_flax_model_generates_its_text_with_a_paged_cache(trained):
    model, loss = trained
    assert loss < 0.1
    text, prompt = flax_train_then_serve.TEXT, flax_train_then_serve.PROMPT
    assert flax_train_then_serve.generate(model, prompt, len(text) - len(prompt)) == text


def test_training_and_serving_compute_the_same_logits(trained):
    model, _ = trained
    text = jnp.arange(97, 97 + 40, dtype=jnp.int32)  # Longer than the window.
    caches = [jattn.PagedCache.create(flax_train_then_serve.CACHE_SPEC) for _ in model.layers]
    size = flax_train_then_serve.BLOCK_SIZE
    metadata = jattn.build_batch_metadata([40], [40], [[5, 2, 7]], block_size=size)
    served, _ = model.step(text, caches, metadata)
    np.testing.assert_allclose(served[0], model(text[None])[0, -1], rtol=1e-4, atol=1e-4)


def test_flax_train_then_serve_prints_the_text(capsys, monkeypatch):
    monkeypatch.setattr(flax_train_then_serve, "train", lambda model, text, steps: 0.5)
    monkeypatch.setattr(flax_train_then_serve, "generate", lambda model, prompt, count: prompt + b"!" * count)
    flax_train_then_serve.main()
    assert capsys.readouterr().out == "loss after training: 0.500\nhow much wood" + "!" * 57 + "\n"


PROMPTS = [[65 + i] * (3 * i + 1) for i in range(6)]
for_each_loop = pytest.mark.parametrize(
    "example", [serve_with_graphs, serve_with_loop], ids=lambda e: e.__name__
)


@pytest.fixture(scope="module")
def engine_tokens():
    """Return the token ids that the engine generates for PROMPTS."""
    engine = jattn.serving.Engine(one_layer_model(), num_blocks=33, max_num_seqs=4, max_num_batched_tokens=64)
    return [result.token_ids for result in engine.generate(PROMPTS, max_tokens=20)]


@for_each_loop
def test_serving_loop_generates_the_engines_tokens(example, engine_tokens):
    generated = example.serve(one_layer_model(), PROMPTS, max_tokens=20)
    new = [tokens[len(prompt) :] for tokens, prompt in zip(generated, PROMPTS, strict=True)]
    assert new == engine_tokens


@for_each_loop
def test_serving_loop_stops_at_the_eos_token(example, engine_tokens):
    model, (first, second) = one_layer_model(), engine_tokens[:2]
    stop = first[0]  # The first token, which the prefill generates.
    model.config = dataclasses.replace(model.config, eos_token_ids=(stop,))
    generated = example.serve(model, PROMPTS[:2], max_tokens=20)
    assert generated[0] == [*PROMPTS[0], stop]
    assert generated[1] == PROMPTS[1] + second[: [*second, stop].index(stop) + 1]


def test_serving_loop_rejects_a_prompt_that_exceeds_a_step():
    with pytest.raises(ValueError, match="prompts must have at most 64 tokens, got 65"):
        serve_with_graphs.serve(one_layer_model(), [[65] * 65], max_tokens=1)


@for_each_loop
def test_serving_loop_prints_its_texts(example, model_dir, capsys, monkeypatch):
    monkeypatch.setattr(example, "TINY_MODEL", model_dir)
    monkeypatch.setattr(example, "serve", lambda model, prompts, max_tokens: prompts)
    example.main()
    assert capsys.readouterr().out.startswith("---\ndef add(a, b):\n\n---\nimport os\nimport \n")


@pytest.mark.kernels
def test_sparsity_study_prints_bits_and_density_of_every_mask(capsys, monkeypatch):
    masks = {name: mask for name, mask in sparsity_study.MASKS.items() if "64" in name or name == "dense"}
    del masks["heads 0, 2 dense, others 4 + 64"]
    monkeypatch.setattr(sparsity_study, "MASKS", masks)
    sparsity_study.main()
    rows = re.findall(r"^(.+?)  +density (\S+)  (\S+) bits per byte$", capsys.readouterr().out, re.MULTILINE)
    density, bits = ({name: float(row[i]) for name, *row in rows} for i in (0, 1))
    assert [*density] == [*sparsity_study.MASKS]
    assert density["dense"] == 1
    assert bits["dense"] < min(value for name, value in bits.items() if name != "dense")
    assert 0 < density["window of 64"] < density["first 4 + window of 64"] < 0.3


@pytest.mark.kernels
def test_sparsity_example_compares_and_plots_patterns(model_dir, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from examples.sparsity.__main__ import main

    sources = tmp_path / "sources"
    sources.mkdir()
    for name in "abcdefghijkl":
        (sources / f"{name}.py").write_text(f"def {name}():\n    return 0\n" * 200)
    patterns = ["dense", "window 128", "pooled blocks, mass 0.5"]
    options = [
        "--windows",
        "1",
        "--tokens",
        "256",
        "--timed-tokens",
        "256",
        "--patterns",
        *patterns,
        "--data",
        str(sources),
    ]
    main(["--model", model_dir, "--out", str(tmp_path), *options])
    rows = (tmp_path / "table.md").read_text().splitlines()[2:]
    figures = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1:4] for row in rows}
    assert list(figures) == patterns
    assert figures["dense"][:2] == ["1.00", "1.000"]
    assert all(float(figures[name][0]) < 1 for name in patterns[1:])
    for name in ("masks", "mass", "speed"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "speed.png" in capsys.readouterr().out


def test_serve_a_batch_preempts_and_finishes_every_request(model_dir, capsys):
    serve_a_batch.main([model_dir])
    out = capsys.readouterr().out
    assert len(re.findall(r"^--- (?:length after 48|stop after \d+) tokens$", out, re.MULTILINE)) == 4
    assert int(re.findall(r"num_preemptions=(\d+)", out)[0]) > 0
    assert "num_blocks=16, peak_blocks=16" in out


def test_demo_prints_every_request_and_a_table(model_dir, capsys):
    demo.main(["--model", model_dir, "--max-tokens", "5"])
    out = capsys.readouterr().out
    assert "\x1b" not in out  # Without a terminal there are no colors.
    for i, prompt in enumerate(demo.PROMPTS):
        assert f"--- request {i} ".ljust(60, "-") + "\n" + prompt in out
    assert len(re.findall(r"^ +\d  +5  +\d+ ms  +[\d.]+  length$", out, re.MULTILINE)) == 5
    assert re.search(r"^ +all +25 ", out, re.MULTILINE)
    assert re.search(r"\d+ steps, 2 compiles \([\d.]+ s, .*\), \d+ of 32 cache blocks at peak$", out)


def test_demo_screen_redraws_in_place_and_ends_with_full_texts(capsys, monkeypatch):
    monkeypatch.setattr(demo, "REDRAW_SECONDS", -1.0)
    screen = demo.Screen(["a\n", "b"], is_terminal=True)
    screen.on_token(0, 1, "c")
    first = capsys.readouterr().out
    assert "\x1b[36mc\x1b[0m" in first
    screen.on_token(1, 1, "d")
    assert capsys.readouterr().out.startswith(f"\x1b[{first.count(chr(10))}F\x1b[J")
    screen.close()
    assert capsys.readouterr().out.endswith(
        "a\n\x1b[36mc\x1b[0m\n" + screen.header(1) + "\nb\x1b[33md\x1b[0m\n"
    )


@pytest.mark.parametrize("name", ["decode_one_step", "serve_a_batch", "sparsity_study"])
def test_short_example_has_at_most_40_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40


@pytest.mark.slow
def test_demo_with_the_tiny_model(capsys):
    demo.main([])
    assert capsys.readouterr().out.count("--- request ") == len(demo.PROMPTS)


def test_the_notebook_runs():
    pytest.importorskip("matplotlib").use("Agg")
    notebook, names = json.loads((EXAMPLES / "research.ipynb").read_text()), {}
    assert notebook["nbformat"] == 4
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "The notebook is stored without outputs."
            exec(compile("".join(cell["source"]), f"research.ipynb, {cell['id']}", "exec"), names)
    assert names["errors"]["causal"] == 0
    assert all(0 < density <= 1 for density in names["density"].values())
    assert all(np.isfinite(norm) and norm > 0 for norm in names["norms"].values())
    assert names["decode_errors"][8] < 1e-5 < names["decode_errors"][2]
