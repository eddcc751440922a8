"""The examples run, and what they print is true."""

import pathlib
import re

import jax.numpy as jnp
import pytest

import jattn
from examples import decode_one_step, demo, flax_layer, serve_a_batch
from tests.in_place import check_in_place
from tests.serving.tiny import one_layer_model

EXAMPLES = pathlib.Path(demo.__file__).parent


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A model that speaks in bytes."""
    directory = tmp_path_factory.mktemp("model")
    jattn.models.save(one_layer_model(), directory)
    return str(directory)


def test_decode_one_step(capsys):
    decode_one_step.main()
    out = capsys.readouterr().out
    assert "slot of each new token: [38 10 28 29 30 31 12]" in out
    assert "position of each:       [6 2 0 1 2 3 4]" in out
    assert "first prompt token == its value: True" in out


def test_decode_one_step_writes_into_the_cache_it_is_given():
    metadata = jattn.build_batch_metadata([1, 1, 5], [7, 3, 5], [[5, 9], [2], [7, 3]], block_size=4)
    rows = [jnp.ones((7, heads, 64)) for heads in (8, 2, 2)]
    check_in_place(decode_one_step.step, decode_one_step.CACHE_SPEC, lambda cache: (cache, metadata, *rows))


def test_flax_layer_steps_to_what_it_computes_at_once(capsys):
    flax_layer.main()
    (difference,) = re.findall(r"at most (\S+)\n", capsys.readouterr().out)
    assert float(difference) < 1e-5


@pytest.mark.kernels
def test_sparsity_compares_patterns_and_draws_them(model_dir, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from examples.sparsity.__main__ import main

    sources = tmp_path / "sources"
    sources.mkdir()
    for name in "abcdefghijkl":
        (sources / f"{name}.py").write_text(f"def {name}():\n    return 0\n" * 200)
    patterns = ["dense", "window 128", "pooled blocks, mass 0.5"]
    options = ["--windows", "1", "--tokens", "256", "--patterns", *patterns, "--data", str(sources)]
    main(["--model", model_dir, "--out", str(tmp_path), *options])
    rows = (tmp_path / "table.md").read_text().splitlines()[2:]
    figures = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1:4] for row in rows}
    assert list(figures) == patterns
    assert figures["dense"][:2] == ["1.00", "1.000"]
    assert all(float(figures[name][0]) < 1 for name in patterns[1:])
    for name in ("masks", "mass", "speed"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "speed.png" in capsys.readouterr().out


def test_serve_a_batch_is_short_of_blocks_and_loses_nobody(model_dir, capsys):
    serve_a_batch.main([model_dir])
    out = capsys.readouterr().out
    assert len(re.findall(r"^--- (?:length after 48|stop after \d+) tokens$", out, re.MULTILINE)) == 4
    assert int(re.findall(r"num_preemptions=(\d+)", out)[0]) > 0
    assert "num_blocks=16, peak_blocks=16" in out


def test_demo_prints_every_request_and_closes_with_its_table(model_dir, capsys):
    demo.main(["--model", model_dir, "--max-tokens", "5"])
    out = capsys.readouterr().out
    assert "\x1b" not in out  # no terminal, no colours
    for i, prompt in enumerate(demo.PROMPTS):
        assert f"--- request {i} ".ljust(60, "-") + "\n" + prompt in out
    assert len(re.findall(r"^ +\d  +5  +\d+ ms  +[\d.]+  length$", out, re.MULTILINE)) == 5
    assert re.search(r"^ +all +25 ", out, re.MULTILINE)
    assert re.search(r"\d+ steps, 2 compiles \([\d.]+ s, .*\), \d+ of 32 cache blocks at peak$", out)


def test_the_demos_screen_redraws_over_itself_and_ends_in_full(capsys, monkeypatch):
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


@pytest.mark.parametrize("name", ["decode_one_step", "serve_a_batch", "flax_layer"])
def test_an_example_is_at_most_40_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40


@pytest.mark.slow
def test_demo_with_the_model_that_ships(capsys):
    demo.main([])
    assert capsys.readouterr().out.count("--- request ") == len(demo.PROMPTS)
