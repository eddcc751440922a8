"""Run decoders on CPU devices with all-reduces over peer memory and by XLA. Run by test_collectives.py."""

import re
from typing import Any
from unittest import mock

import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")

import jax.numpy as jnp  # noqa: E402

import jattn  # noqa: E402
from jattn.models import load, use_peer_memory  # noqa: E402
from jattn.serving import Engine  # noqa: E402
from pallas_kernels import collectives  # noqa: E402
from tests.conftest import GOLDEN  # noqa: E402

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 9]
BUCKET = jattn.Bucket(max_decodes=2, max_prefills=2, max_prefill_tokens=32, max_blocks=4)
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "num_blocks": 33, "max_model_len": 64}
EXCHANGE = re.compile(r"(\S+)\{\S* (all-gather|all-reduce)(?:-start)?\(")
FAMILIES = "llama", "gemma3"  # the norm behind attention's sum follows the residual's, and goes before it


def run(family: str, dtype: Any, *, uses_peers: bool, **mesh: int) -> tuple[list[list[int]], list[list[str]]]:
    """Tokens, and how often each bucket's executable gathers (our sum, on a CPU) and sums (XLA's)."""
    how = {"mesh": jattn.parallel.make_mesh(**mesh), "dtype": dtype, "progress": False}
    model = load(GOLDEN / "hf" / family, **how)
    assert model.peers is None
    if uses_peers:
        use_peer_memory(model)
    engine = Engine(model, **SIZES, buckets=[BUCKET])
    with mock.patch.object(collectives, "all_gather", side_effect=collectives.all_gather) as gather:
        engine.precompile(progress=False)
    # What it compiles to on a CPU XLA's own would, too.
    assert gather.called == (uses_peers and "cp" in mesh), (uses_peers, mesh)
    tokens = [result.token_ids for result in engine.generate(PROMPTS, max_tokens=8)]
    texts = [executable.as_text() for executable in engine.graphs.executables.values()]
    return tokens, [[kind for _, kind in EXCHANGE.findall(text)] for text in texts]


def check(family: str, **mesh: int) -> None:
    """Tokens are the same; all 16-bit sums are ours, but gemma3's of embeddings; of others none is.

    Where keys lie on both devices each layer gathers its log-sum-exps, besides.
    """
    layers = load(GOLDEN / "hf" / family, progress=False).config.num_hidden_layers
    for dtype in (jnp.bfloat16, jnp.float32)[len(mesh) - 1 :]:  # 16 bits of four parts round otherwise
        wanted, by_xla = run(family, dtype, uses_peers=False, **mesh)
        found, exchanges = run(family, dtype, uses_peers=True, **mesh)
        assert found == wanted, (family, dtype, found, wanted)
        sums = [kinds.count("all-reduce") for kinds in by_xla]
        assert sums == [1 + 2 * layers] * len(by_xla), by_xla
        gathers = layers if "cp" in mesh else 0
        theirs, ours = ([kinds.count(kind) for kinds in exchanges] for kind in ("all-reduce", "all-gather"))
        if dtype == jnp.bfloat16:
            by_xla_still = int(family == "gemma3")
            expected = [by_xla_still] * len(sums), [1 + 2 * layers - by_xla_still + gathers] * len(sums)
            assert (theirs, ours) == expected, exchanges
        else:
            assert (theirs, ours) == (sums, [gathers] * len(sums)), exchanges
    print(f"{family} {mesh}: {len(by_xla)} executables", flush=True)


if __name__ == "__main__":
    for family in FAMILIES:
        check(family, tp=2)
    check("llama", cp=2)
    check("llama", tp=2, cp=2)  # three heads a device
