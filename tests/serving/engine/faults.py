"""Faults to inject: errors of the device, the tokenizer or a step."""

import contextlib

import jax

from jattn.runtime.decode_graphs import DecodeGraphs


class FailingGraphs(DecodeGraphs):
    """An engine's executables, of which call number `at` fails with its caches donated: they are gone."""

    def __init__(self, graphs, at):
        self._graphs, self._left = graphs, at

    def __getattr__(self, name):
        return getattr(self._graphs, name)

    def __call__(self, params, caches, *arguments):
        self._left -= 1
        if self._left == 0:
            for array in jax.tree.leaves(caches):
                array.delete()
            raise jax.errors.JaxRuntimeError("INTERNAL: the device fell over")
        return self._graphs(params, caches, *arguments)


@contextlib.contextmanager
def device_fails(engine, at=1):
    """Call number `at` from now of the engine's executables fails."""
    runner = engine._runner
    graphs = runner.graphs
    runner.graphs = runner._runs[0].graphs = FailingGraphs(graphs, at)
    try:
        yield
    finally:
        runner.graphs = runner._runs[0].graphs = graphs


@contextlib.contextmanager
def reading_fails(engine, at=1):
    """Reading number `at` of a step's tokens from now finds that the device has failed."""
    runner, left = engine._runner, at
    read = runner.read

    def failing():
        nonlocal left
        left -= 1
        if left == 0:
            raise jax.errors.JaxRuntimeError("INTERNAL: the device fell over")
        return read()

    runner.read = failing
    try:
        yield
    finally:
        del runner.read


class PoisonedTokenizer:
    """A tokenizer that cannot decode one token."""

    def __init__(self, tokenizer, poison):
        self._tokenizer, self.poison = tokenizer, poison

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, ids, **options):
        if self.poison in ids:
            raise UnicodeError(f"token {self.poison} is poisoned")
        return self._tokenizer.decode(ids, **options)
