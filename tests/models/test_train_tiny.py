"""The parts of examples/train_tiny.py that need no GPU, and the sources that it reads."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from examples import python_sources, train_tiny
from jattn.models import Decoder, DecoderConfig, load, save


@pytest.mark.kernels
@given(st.text().filter(lambda text: "<|endoftext|>" not in text))
def test_ids_are_the_bytes_of_the_text(text):
    tokenizer = python_sources.byte_tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode([*ids, python_sources.END_OF_TEXT]) == text


def test_held_out_files_are_not_trained_on(tmp_path):
    (tmp_path / "encodings").mkdir()
    (tmp_path / "encodings" / "table.py").write_text("left out")
    for i in range(30):
        (tmp_path / f"file{i:02}.py").write_bytes(bytes([i]))
    train, held_out = python_sources.read_sources(tmp_path)
    assert held_out.tolist() == [10, 256]
    assert train.tolist() == [token for i in range(30) if i != 10 for token in (i, 256)]


def test_the_rate_rises_and_falls():
    rates = [train_tiny.learning_rate(progress, 1.0) for progress in np.linspace(0, 1, 101)]
    assert rates[0] < 0.1
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[-1] == pytest.approx(0.02)
    assert rates[2:] == sorted(rates[2:], reverse=True)


@pytest.mark.kernels
def test_an_untrained_model_needs_eight_bits_a_byte(tmp_path, monkeypatch):
    """257 equal probabilities cost log2(257) bits per token; windows and padding must not change that."""
    monkeypatch.setattr(python_sources, "CONTEXT", 8)
    config = DecoderConfig.from_hf(train_tiny.HF_CONFIG | {"num_hidden_layers": 1})
    model = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    model.embed_tokens.embedding[...] = jnp.zeros((257, 192))
    save(model, tmp_path)
    stream = np.arange(1, 60).astype(np.int32)
    assert train_tiny.bits_per_byte(tmp_path, stream, batch=3) == pytest.approx(np.log2(257))


def test_parameters_fit_two_millions():
    config = DecoderConfig.from_hf(train_tiny.HF_CONFIG)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) <= 2_000_000


@pytest.mark.kernels
def test_a_short_training_saves_a_model_that_needs_fewer_bits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(python_sources, "CONTEXT", 32)
    monkeypatch.setitem(train_tiny.HF_CONFIG, "num_hidden_layers", 1)
    data = tmp_path / "data"
    data.mkdir()
    for i in range(20):
        (data / f"{i:02}.py").write_text("def add(a, b):\n    return a + b\n" * 4)
    arguments = ["--steps", "50", "--batch-tokens", "64", "--data", str(data), "--out", str(tmp_path / "out")]
    with jax.numpy_dtype_promotion("standard"):  # jax.nn's and optax's
        train_tiny.main(arguments)
    (bits,) = re.findall(r"held-out bits per byte: (\S+)\n", capsys.readouterr().out)
    assert float(bits) < 5
    assert load(tmp_path / "out", progress=False).tokenizer.decode([100, 101]) == "de"


def test_half_a_chunk_of_steps_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train_tiny.main(["--steps", "30", "--out", str(tmp_path)])
    assert "--steps must be a positive multiple of 25, got 30" in capsys.readouterr().err
