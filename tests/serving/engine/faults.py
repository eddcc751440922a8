"""Injected faults: errors of the device, the tokenizer or a step."""

import contextlib

import jax

from jattn.runtime.decode_graphs import DecodeGraphs


class FailingGraphs(DecodeGraphs):
    """An engine's executables that fail at the given call, after its caches were donated."""

    def __init__(self, graphs, call_number):
        self._graphs, self._left = graphs, call_number

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
def device_fails(engine, call_number=1):
    """Let the given call of the engine's executables, counted from now, fail."""
    runner = engine._runner
    graphs = runner.graphs
    runner.graphs = runner._runs[0].graphs = FailingGraphs(graphs, call_number)
    try:
        yield
    finally:
        runner.graphs = runner._runs[0].graphs = graphs


@contextlib.contextmanager
def reading_fails(engine, call_number=1):
    """Let the given read of a step's tokens, counted from now, find that the device has failed."""
    runner, left = engine._runner, call_number
    read = runner.read

    def failing(outputs):
        nonlocal left
        left -= 1
        if left == 0:
            raise jax.errors.JaxRuntimeError("INTERNAL: the device fell over")
        return read(outputs)

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
