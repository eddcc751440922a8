"""Errors for users' mistakes, without the tests' type checks, so that the library's own checks are the first.

python -m tests.serving.mistakes EXPRESSION ... prints the error of each as a JSON list.
"""

import json
import sys

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from jattn.serving import Engine, SamplingParams, StructuredOutputsParams
from jattn.serving.engine.served_model import MEMBERS

# tests.conftest adds type checks to modules that are imported after it, and the public names import theirs on
# first use.
for name in jattn.__all__:
    getattr(jattn, name)
from tests.conftest import GOLDEN  # noqa: E402
from tests.serving.tiny import one_layer_model  # noqa: E402


class Mistakes:
    """Small objects to make mistakes with."""

    def __init__(self) -> None:
        self.model = one_layer_model()
        self.engine = Engine(self.model, num_blocks=9, max_num_seqs=2)
        self.spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8)
        self.layer = jattn.PagedAttention(16, self.spec, rngs=nnx.Rngs(0))
        self.metadata = jattn.build_batch_metadata([3, 5], [3, 5], None)
        self.members = MEMBERS
        self.bucket = jattn.Bucket(max_decodes=2, max_blocks=2)
        self.cache_spec = jattn.CacheSpec(num_blocks=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32)
        self.cache = jattn.PagedCache.create(self.cache_spec)
        self.decodes = jattn.build_batch_metadata([1, 1], [3, 3], [[1], [2]])
        self.rows, self.row = jnp.ones((2, 2, 8)), jnp.ones((1, 1, 8))

    def loop(self, step=len, metadata=None, sample=len):
        metadata = self.decodes if metadata is None else metadata
        return jattn.decode_loop(step, {}, (), metadata, [1, 1], num_steps=2, sample=sample)

    def attend(self, **changes):
        arguments = {"x": jnp.ones((8, 16)), "cache": None, "metadata": self.metadata}
        return self.layer(**arguments | {"positions": self.metadata.positions} | changes)


def error_of(expression, names):
    try:
        eval(expression, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    mistakes = Mistakes()
    names = {
        "m": mistakes,
        "jnp": jnp,
        "np": np,
        "nnx": nnx,
        "jattn": jattn,
        "Engine": Engine,
        "GOLDEN": GOLDEN,
    }
    names["Form"] = StructuredOutputsParams
    names |= {
        "SamplingParams": SamplingParams,
        "ask": mistakes.engine.generate,
        "add": mistakes.engine.add_request,
    }
    print(json.dumps([error_of(expression, names) for expression in sys.argv[1:]]))
