"""A serving loop of one's own: requests come and go, each step runs its bucket's executable."""

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
    """A prompt and what it became; the last `num_new` of its tokens are not in the cache yet."""

    tokens: list[int]
    max_len: int
    num_new: int
    blocks: list[int] = dataclasses.field(default_factory=list)


def serve(model: jattn.models.Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """All tokens of each prompt; MAX_REQUESTS of them run at once, each in blocks of its own.

    Raises:
        ValueError: A prompt is longer than a step; jattn.serving.Engine computes such in chunks.
    """
    longest = max(map(len, prompts))
    if longest > MAX_PROMPT_TOKENS:
        raise ValueError(f"prompts must have at most {MAX_PROMPT_TOKENS} tokens, got {longest}.")
    graphdef, params = nnx.split(model)

    def step(params: Any, caches: Any, metadata: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graphdef, params)
        plan = model.plan(metadata, caches)  # once, for all layers
        hidden, caches = model(tokens, caches, metadata, plan=plan)
        return jnp.argmax(model.logits(hidden[metadata.last_token_indices]), axis=-1), caches

    graphs = jattn.DecodeGraphs(step, [DECODES, MIXED])
    caches = model.create_caches(1 + MAX_REQUESTS * MAX_BLOCKS, block_size=BLOCK_SIZE)
    shapes = lambda bucket: [jax.ShapeDtypeStruct((bucket.max_tokens,), jnp.int32)]
    graphs.precompile(params, caches, block_size=BLOCK_SIZE, inputs=shapes, progress=False)

    requests = [Request([*prompt], len(prompt) + max_tokens, len(prompt)) for prompt in prompts]
    waiting, running = collections.deque(requests), list[Request]()
    free = [
        [1 + MAX_BLOCKS * r + i for i in range(MAX_BLOCKS)] for r in range(MAX_REQUESTS)
    ]  # block 0 is padding's
    while waiting or running:
        room = MAX_PROMPT_TOKENS
        while (
            waiting and free and waiting[0].num_new <= room
        ):  # decode rows stand first, so prompts join behind
            room -= waiting[0].num_new
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
            to_device=False,  # the executable sends numpy's arrays itself
        )
        tokens = jattn.pack_tokens([request.tokens[-request.num_new :] for request in running], bucket)
        picked, caches = graphs(params, caches, metadata, tokens)
        rows = jattn.row_indices(np.asarray(query_lens), bucket)  # each request's row in the bucket
        for request, token in zip(running, np.asarray(picked)[rows].tolist(), strict=True):
            request.tokens.append(token)
            request.num_new = 1
        is_done = lambda request: (
            len(request.tokens) == request.max_len or request.tokens[-1] in model.config.eos_token_ids
        )
        free += [request.blocks for request in running if is_done(request)]
        running = [request for request in running if not is_done(request)]
    assert graphs.num_compiles == 2
    return [request.tokens for request in requests]


def main() -> None:
    model = jattn.models.load(TINY_MODEL, progress=False)
    prompts = ["def add(a, b):\n", "import os\nimport ", "class Point:\n", "x = [", "for i in ", "try:\n"]
    for tokens in serve(model, [model.tokenizer.encode(prompt).ids for prompt in prompts], max_tokens=32):
        print("---\n" + model.tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
