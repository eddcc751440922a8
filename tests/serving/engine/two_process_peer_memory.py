"""One of two processes, with one device each, that run one engine with peer-memory all-reduces: PORT RANK
PLATFORM.

PLATFORM is "cpu", or "gpu", where each process sees its own GPU. Run by test_processes.py.
"""

import json
import os
import sys
from typing import Any

import jax

PORT, RANK, WHERE = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if WHERE == "gpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[RANK]
else:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, RANK)

import jax.numpy as jnp  # noqa: E402

import jattn  # noqa: E402
from jattn.models import load, use_peer_memory  # noqa: E402
from jattn.models.collectives import why_not_peer_memory  # noqa: E402
from jattn.serving import Engine  # noqa: E402

MODEL = "examples/tiny_model"
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "num_blocks": 33, "max_model_len": 64}
PROMPTS = ["def f(", "class "]
AXES = ("tp", "cp")  # of which one is sharded


def generated(engine: Engine) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(PROMPTS, max_tokens=16)]


def tokens_of_both_processes(**axes: int) -> Any:
    """Return the tokens in process 0, and None in the other, which follows."""
    model = load(MODEL, mesh=jattn.parallel.make_mesh(**axes), dtype=jnp.bfloat16, progress=False)
    reason = why_not_peer_memory(model)  # what `jattn serve` asks
    assert reason == (None if WHERE == "gpu" else "the devices are not NVIDIA GPUs"), reason
    use_peer_memory(model)
    engine = Engine(model, **SIZES)
    if RANK > 0:
        engine.follow()
        return None
    tokens = generated(engine)
    engine.close()
    return tokens


def main() -> None:
    tokens = {axis: tokens_of_both_processes(**{axis: 2}) for axis in AXES}
    if RANK == 0:
        tokens["alone"] = generated(Engine(load(MODEL, dtype=jnp.bfloat16, progress=False), **SIZES))
        print(json.dumps(tokens), flush=True)


if __name__ == "__main__":
    main()
