"""A minimal serving loop with DecodeGraphs: each step runs the executable of its bucket."""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn

TINY_MODEL = pathlib.Path(__file__).parent / "tiny_model"
BLOCK_SIZE, MAX_BLOCKS, MAX_REQUESTS, MAX_PROMPT_TOKENS = 16, 8, 4, 64
DECODES = jattn.Bucket(max_decodes=MAX_REQUESTS, max_blocks=MAX_BLOCKS)
MIXED = jattn.Bucket(
    max_decodes=MAX_REQUESTS,
    max_prefills=MAX_REQUESTS,
    max_prefill_tokens=MAX_PROMPT_TOKENS,
    max_blocks=MAX_BLOCKS,
)


@dataclasses.dataclass
class Request:
    """A request in progress.

    Attributes:
        tokens: Prompt and generated tokens.
        max_len: Maximum number of tokens.
        num_new: Number of last tokens that are not in the KV cache yet.
        blocks: Block ids of the request.
    """

    tokens: list[int]
    max_len: int
    num_new: int
    blocks: list[int] = dataclasses.field(default_factory=list)


def serve(model: jattn.models.Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return the tokens of each prompt and its greedy completion; up to MAX_REQUESTS run at once.

    Raises:
        ValueError: If a prompt does not fit into a step. `jattn.serving.Engine` prefills it in chunks.
    """
    max_prompt_len = max(map(len, prompts))
    if max_prompt_len > MAX_PROMPT_TOKENS:
        raise ValueError(f"prompts must have at most {MAX_PROMPT_TOKENS} tokens, got {max_prompt_len}.")
    graphdef, params = nnx.split(model)

    def step(params: Any, caches: Any, metadata: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graphdef, params)
        plan = model.plan(metadata, caches)  # One plan for all layers.
        hidden, caches = model(tokens, caches, metadata, plan=plan)
        return jnp.argmax(model.logits(hidden[metadata.last_token_indices]), axis=-1), caches

    graphs = jattn.DecodeGraphs(step, [DECODES, MIXED])
    caches = model.create_caches(1 + MAX_REQUESTS * MAX_BLOCKS, block_size=BLOCK_SIZE)

    def inputs(bucket: jattn.Bucket) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((bucket.max_tokens,), jnp.int32)]

    graphs.precompile(params, caches, block_size=BLOCK_SIZE, inputs=inputs, progress=False)

    requests = [Request([*prompt], len(prompt) + max_tokens, len(prompt)) for prompt in prompts]
    waiting, running = collections.deque(requests), list[Request]()
    # Block 0 is the padding's.
    free = [[1 + MAX_BLOCKS * r + i for i in range(MAX_BLOCKS)] for r in range(MAX_REQUESTS)]
    while waiting or running:
        num_free_tokens = MAX_PROMPT_TOKENS
        # Decoding requests precede prefilling ones in a batch, so new requests are appended.
        while waiting and free and waiting[0].num_new <= num_free_tokens:
            num_free_tokens -= waiting[0].num_new
            running.append(waiting.popleft())
            running[-1].blocks = free.pop()
        query_lens = [request.num_new for request in running]
        bucket = graphs.choose(query_lens)
        metadata = jattn.build_batch_metadata(
            query_lens,
            [len(request.tokens) for request in running],
            [request.blocks for request in running],
            block_size=BLOCK_SIZE,
            bucket=bucket,
            to_device=False,  # The executable transfers NumPy arrays by itself.
        )
        tokens = jattn.pack_tokens([request.tokens[-request.num_new :] for request in running], bucket)
        next_tokens, caches = graphs(params, caches, metadata, tokens)
        rows = jattn.row_indices(np.asarray(query_lens), bucket)  # Row of each request in the bucket.
        for request, token in zip(running, np.asarray(next_tokens)[rows].tolist(), strict=True):
            request.tokens.append(token)
            request.num_new = 1
        for request in running.copy():
            if len(request.tokens) == request.max_len or request.tokens[-1] in model.config.eos_token_ids:
                running.remove(request)
                free.append(request.blocks)
    assert graphs.num_compiles == 2
    return [request.tokens for request in requests]


def main() -> None:
    model = jattn.models.load(TINY_MODEL, progress=False)
    prompts = ["def add(a, b):\n", "import os\nimport ", "class Point:\n", "x = [", "for i in ", "try:\n"]
    for tokens in serve(model, [model.tokenizer.encode(prompt).ids for prompt in prompts], max_tokens=32):
        print("---\n" + model.tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
