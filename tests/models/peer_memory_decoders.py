"""Run decoders on CPU devices with all-reduces over peer memory and by XLA. Run by test_collectives.py."""

import pathlib
import re
import tempfile
from typing import Any
from unittest import mock

import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

import jattn  # noqa: E402
from jattn.models import Decoder, DecoderConfig, load, save, use_peer_memory  # noqa: E402
from jattn.models.loading.pretrained import read_config  # noqa: E402
from jattn.serving import Engine  # noqa: E402
from pallas_kernels import collectives  # noqa: E402
from tests.conftest import GOLDEN  # noqa: E402

LAYERS = 2  # a sum over devices is followed by the norm of the same layer, of the next one, or of the model
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 9]
BUCKET = jattn.Bucket(max_decodes=2, max_prefills=2, max_prefill_tokens=32, max_blocks=4)
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "num_blocks": 33, "max_model_len": 64}
EXCHANGE = re.compile(r"\}\S* (all-gather|all-reduce)(?:-start)?\(")


def save_model(family: str, folder: pathlib.Path) -> None:
    """Save a model with random weights and `LAYERS` layers."""
    hf = read_config(GOLDEN / "hf" / family).to_hf() | {"num_hidden_layers": LAYERS, "eos_token_id": None}
    if "layer_types" in hf:
        hf["layer_types"] = hf["layer_types"][-LAYERS:]  # of Gemma3's layers the last one is a full one
    save(Decoder(DecoderConfig.from_hf(hf), rngs=nnx.Rngs(0)), folder)


def run(
    folder: pathlib.Path, dtype: Any, *, uses_peers: bool, **mesh: int
) -> tuple[list[list[int]], list[list[str]]]:
    """Return the tokens, and the collectives of each bucket: all-gathers of our all-reduce (on a CPU), and
    XLA's all-reduces.
    """
    options = {"mesh": jattn.parallel.make_mesh(**mesh), "dtype": dtype, "progress": False}
    model = load(folder, **options)
    assert model.peers is None
    if uses_peers:
        use_peer_memory(model)
    engine = Engine(model, **SIZES, buckets=[BUCKET])
    with mock.patch.object(collectives, "all_gather", side_effect=collectives.all_gather) as gather:
        engine.precompile(progress=False)
    # On a CPU it compiles to what XLA's collectives compile to.
    assert gather.called == (uses_peers and "cp" in mesh), (uses_peers, mesh)
    tokens = [result.token_ids for result in engine.generate(PROMPTS, max_tokens=8)]
    texts = [executable.as_text() for executable in engine.graphs.executables.values()]
    return tokens, [EXCHANGE.findall(text) for text in texts]


def check(root: pathlib.Path, family: str, dtype: Any, **mesh: int) -> None:
    """Check that tokens are equal and that all 16-bit sums use peer memory, except gemma3's of embeddings.

    With context parallelism each layer also gathers log-sum-exps.
    """
    folder = root / family
    if not folder.exists():
        save_model(family, folder)
    xla_tokens, by_xla = run(folder, dtype, uses_peers=False, **mesh)
    peer_memory_tokens, exchanges = run(folder, dtype, uses_peers=True, **mesh)
    assert peer_memory_tokens == xla_tokens, (family, dtype, peer_memory_tokens, xla_tokens)
    sums = [kinds.count("all-reduce") for kinds in by_xla]
    assert sums == [1 + 2 * LAYERS] * len(by_xla), by_xla
    gathers = LAYERS if "cp" in mesh else 0
    num_xla_sums, num_peer_memory_sums = (
        [kinds.count(kind) for kinds in exchanges] for kind in ("all-reduce", "all-gather")
    )
    if dtype == jnp.bfloat16:
        num_remaining_xla_sums = int(family == "gemma3")
        expected = (
            [num_remaining_xla_sums] * len(sums),
            [1 + 2 * LAYERS - num_remaining_xla_sums + gathers] * len(sums),
        )
        assert (num_xla_sums, num_peer_memory_sums) == expected, exchanges
    else:
        assert (num_xla_sums, num_peer_memory_sums) == (sums, [gathers] * len(sums)), exchanges
    print(f"{family} {mesh}: {len(by_xla)} executables", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        check(folder, "llama", jnp.bfloat16, tp=2)  # with a norm after the residual
        check(folder, "gemma3", jnp.bfloat16, tp=2)  # with a norm before it
        check(folder, "llama", jnp.bfloat16, cp=2)
        # Three heads a device. 16 bits of four parts round otherwise; float32 sums do not use peer memory.
        check(folder, "llama", jnp.float32, tp=2, cp=2)
