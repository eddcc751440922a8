"""nano-vllm's workload through an engine whose model is on several devices."""

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
    """How much of the workload is run, and by which steps.

    Attributes:
        config: Of the model.
        requests: Of the workload's 256.
        longest: Tokens of a prompt, and of an answer, at most.
        decodes: Requests of steps that decode alone; the largest are those of all others, too.
        prefill_tokens: New tokens of prompts in a step.
        num_blocks: Of the caches.
    """

    config: dict[str, Any]
    requests: int
    longest: int
    decodes: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    num_blocks: int


def measure_nano(case: NanoCase, mesh: Mesh, *, uses_peers: bool) -> Iterator[dict[str, Any]]:
    """A row for a first run, for new prompts, and for the same again; log-probabilities are checked first."""
    model = random_decoder(case.config, mesh)
    if uses_peers:
        use_peer_memory(model, max_rows=max(case.decodes))
    engine = engine_of(model, case)
    engine.precompile(progress=False)
    how = {
        "tp": mesh.shape[TP],
        "sums": "all_reduce" if uses_peers else "psum",
        **checked_tokens(engine, model),
    }
    for name, run in RUNS:
        yield {"name": name, **nano_bench(engine, run, requests=case.requests, max_len=case.longest), **how}


def engine_of(model: Any, case: NanoCase) -> Engine:
    """With no more buckets than this workload has use for: of 73, most would compile for nothing."""
    most = max(case.decodes)
    sizes = [{"max_decodes": count} for count in case.decodes]
    sizes += [
        {"max_decodes": most, "max_prefills": most, "max_prefill_tokens": count}
        for count in case.prefill_tokens
    ]
    max_blocks = case.config["max_position_embeddings"] // 16
    return Engine(
        model,
        num_blocks=case.num_blocks,
        max_num_seqs=most,
        max_num_batched_tokens=max(case.prefill_tokens),
        buckets=[jattn.Bucket(max_blocks=max_blocks, **size) for size in sizes],
        cascade_attention=False,
    )
