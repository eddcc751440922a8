"""nano-vllm's workload served by an engine on several devices."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.sharding import Mesh

import jattn
from benchmarks.models.random_decoder import random_decoder
from benchmarks.serving.engine import checked_tokens, nano_bench
from benchmarks.serving.nano_workload import RUNS
from jattn.models import use_peer_memory
from jattn.parallel import TP
from jattn.serving import Engine


class NanoCase(NamedTuple):
    """A part of the workload, and the buckets of the engine.

    Attributes:
        config: Contents of the model's config.json.
        requests: Number of requests, at most 256.
        max_len: Maximum number of tokens of a prompt and of a completion.
        decodes: Rows of the buckets for decodes only. Buckets with prompts have the largest number.
        prefill_tokens: Prompt tokens of the buckets with prompts.
        num_blocks: Number of cache blocks.
    """

    config: dict[str, Any]
    requests: int
    max_len: int
    decodes: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    num_blocks: int


def measure_nano(case: NanoCase, mesh: Mesh, *, uses_peers: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each of RUNS, after a check of the engine's log-probabilities.

    Args:
        case: Part of the workload.
        mesh: Devices.
        uses_peers: Whether all-reduce uses peer memory instead of NCCL.
    """
    model = random_decoder(case.config, mesh)
    if uses_peers:
        use_peer_memory(model, max_rows=max(case.decodes))
    engine = make_engine(model, case)
    engine.precompile(progress=False)
    columns = {
        "tp": mesh.shape[TP],
        "sums": "all_reduce" if uses_peers else "psum",
        **checked_tokens(engine, model),
    }
    for name, run in RUNS:
        row = nano_bench(engine, run, requests=case.requests, max_len=case.max_len)
        yield {"name": name, **row, **columns}


def make_engine(model: Any, case: NanoCase) -> Engine:
    """Create an engine with only the buckets that the workload uses."""
    max_num_seqs = max(case.decodes)
    bucket = functools.partial(jattn.Bucket, max_blocks=case.config["max_position_embeddings"] // 16)
    buckets = [bucket(max_decodes=count) for count in case.decodes]
    buckets += [
        bucket(max_decodes=max_num_seqs, max_prefills=max_num_seqs, max_prefill_tokens=count)
        for count in case.prefill_tokens
    ]
    return Engine(
        model,
        num_blocks=case.num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(case.prefill_tokens),
        buckets=buckets,
        cascade_attention=False,
    )
