"""The model in examples/tiny_model and its training."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from examples import python_sources, train_tiny
from examples.demo import TINY_MODEL
from jattn.models import Decoder, DecoderConfig, load

# Written for this test, so that no model has seen it.
SNIPPET = '''"""Keeps a pantry: what is in it, how much, and until when it is good."""

import dataclasses
import datetime
import json
from collections.abc import Iterator


class NotEnough(Exception):
    """Raised when more is taken than there is."""

    def __init__(self, name, wanted, available):
        super().__init__(f"only {available} of {name} left, {wanted} wanted")
        self.name = name
        self.wanted = wanted
        self.available = available


@dataclasses.dataclass
class Jar:
    name: str
    grams: int
    best_before: datetime.date

    def is_spoiled(self, today):
        return today > self.best_before


class Pantry:
    """Jars by name, the oldest first."""

    def __init__(self, jars=()):
        self._jars = {}
        for jar in jars:
            self.add(jar)

    def __len__(self):
        return sum(len(jars) for jars in self._jars.values())

    def __iter__(self) -> Iterator[Jar]:
        for jars in self._jars.values():
            yield from jars

    def add(self, jar):
        """Put a jar on the shelf."""
        if jar.grams <= 0:
            raise ValueError("an empty jar")
        jars = self._jars.setdefault(jar.name, [])
        jars.append(jar)
        jars.sort(key=lambda jar: jar.best_before)

    def take(self, name, grams):
        """Remove some grams, from the oldest jars first."""
        available = sum(jar.grams for jar in self._jars.get(name, []))
        if available < grams:
            raise NotEnough(name, grams, available)
        while grams > 0:
            jar = self._jars[name][0]
            taken = min(jar.grams, grams)
            jar.grams -= taken
            grams -= taken
            if jar.grams == 0:
                self._jars[name].pop(0)
        return self

    def throw_away(self, today=None):
        """Remove what is spoiled and return it."""
        if today is None:
            today = datetime.date.today()
        spoiled = [jar for jar in self if jar.is_spoiled(today)]
        for jar in spoiled:
            self._jars[jar.name].remove(jar)
        return spoiled


def load(path):
    """Read a pantry from a file."""
    with open(path, encoding="utf-8") as file:
        entries = json.load(file)
    pantry = Pantry()
    for entry in entries:
        date = datetime.date.fromisoformat(entry["best_before"])
        pantry.add(Jar(entry["name"], int(entry["grams"]), date))
    return pantry


def main(argv=None):
    pantry = load(argv[1])
    for jar in pantry.throw_away():
        print(f"{jar.name}: {jar.grams} g spoiled on {jar.best_before}")


if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load(TINY_MODEL, progress=False)


def snippet_windows(tokens: int) -> jax.Array:
    return jnp.asarray(np.frombuffer(SNIPPET.encode(), np.uint8).astype(np.int32)[None, : tokens + 1])


def test_the_tiny_model_is_tiny(model):
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    assert count <= 2_000_000
    assert (TINY_MODEL / "model.safetensors").stat().st_size <= 4_000_000
    assert model.dtype == jnp.bfloat16
    assert model.max_len == python_sources.CONTEXT == 2048
    assert f"| parameters | {count:,} |" in (TINY_MODEL / "README.md").read_text()


def test_its_files_are_those_of_the_training_script(model):
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    assert tokenizer.to_str() == python_sources.byte_tokenizer().to_str()
    config = json.loads((TINY_MODEL / "config.json").read_text())
    assert {key: config.get(key) for key in train_tiny.HF_CONFIG if key != "dtype"} == {
        key: value for key, value in train_tiny.HF_CONFIG.items() if key != "dtype"
    }


@pytest.mark.parametrize("text", [SNIPPET, "", "naïve 日本 \U0001f600\r\n\t\x00"])
def test_the_tokenizer_restores_the_text(model, text):
    ids = model.tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert model.tokenizer.decode(ids) == text


@pytest.mark.kernels
def test_the_model_predicts_python(model):
    """Uniform probabilities cost 8 bits per byte, byte frequencies of the snippet 4.4, and xz 3.4."""
    graph, params = nnx.split(model)
    bits = jax.jit(lambda params, windows: train_tiny.bits(nnx.merge(graph, params), windows))
    num_bits = bits(params, snippet_windows(python_sources.CONTEXT))
    assert num_bits.shape == (1, python_sources.CONTEXT)
    assert float(num_bits.mean()) < 1.2


@pytest.mark.kernels
def test_training_computes_the_bits_that_the_model_needs():
    """The batched training code uses jax.nn's attention and one-hot products, but is the same function."""
    config = DecoderConfig.from_hf(train_tiny.HF_CONFIG | {"num_hidden_layers": 1})
    make = lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32, implementation="reference")
    windows = snippet_windows(119).reshape(3, 40)

    @jax.jit
    def both(windows):
        model = make()
        return train_tiny.training_bits(model, windows, "xla"), train_tiny.bits(model, windows)

    np.testing.assert_allclose(*both(windows), rtol=1e-5)


def test_windows_begin_where_lines_do(monkeypatch):
    monkeypatch.setattr(python_sources, "CONTEXT", 3)
    ends = np.array([10, python_sources.END_OF_TEXT])
    stream = np.array([65, ends[0], 66, 66, ends[1], 67, ends[0], 68, 68, 68, ends[0], 69])
    assert python_sources.line_starts(stream).tolist() == [2, 5, 7]
