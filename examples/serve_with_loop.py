"""A queue of prompts by `decode_loop`: 16 tokens of every row in one call, then others take the free rows."""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn

TINY_MODEL = pathlib.Path(__file__).parent / "tiny_model"
BLOCK_SIZE, MAX_BLOCKS, ROWS, LOOP_STEPS = 16, 8, 4, 16
DECODES = jattn.Bucket(max_decodes=ROWS, max_blocks=MAX_BLOCKS)
PROMPT = jattn.Bucket(max_prefills=1, max_prefill_tokens=64, max_blocks=MAX_BLOCKS)
BLOCKS = [
    [1 + MAX_BLOCKS * row + i for i in range(MAX_BLOCKS)] for row in range(ROWS)
]  # block 0 is padding's


def likeliest(logits: jax.Array, index: Any) -> jax.Array:
    return jnp.argmax(logits, axis=-1)


def serve(model: jattn.models.Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """All tokens of each prompt; a row keeps its blocks for whoever comes next."""
    graphdef, params = nnx.split(model)

    def step(params: Any, caches: Any, metadata: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graphdef, params)
        hidden, caches = model(tokens, caches, metadata, plan=model.plan(metadata, caches))
        return model.logits(hidden[metadata.last_token_indices]), caches

    prefill = jax.jit(step, donate_argnums=1)
    caches = model.create_caches(1 + ROWS * MAX_BLOCKS, block_size=BLOCK_SIZE)
    texts, owners, next_prompt = [[*prompt] for prompt in prompts], [-1] * ROWS, 0
    while True:
        for row in range(ROWS):
            if owners[row] < 0 and next_prompt < len(prompts):
                owners[row], next_prompt = next_prompt, next_prompt + 1
                text = texts[owners[row]]
                metadata = jattn.build_batch_metadata(
                    [len(text)], [len(text)], [BLOCKS[row]], block_size=BLOCK_SIZE, bucket=PROMPT
                )
                logits, caches = prefill(params, caches, metadata, jattn.pack_tokens([text], PROMPT))
                text.append(int(likeliest(logits, 0)[0]))
        rows = [row for row in range(ROWS) if owners[row] >= 0]
        if not rows:
            return texts
        live = [texts[owners[row]] for row in rows]  # the newest token of each is not in the cache yet
        metadata = jattn.build_batch_metadata(
            [1] * len(rows),
            [len(text) for text in live],
            [BLOCKS[row] for row in rows],
            block_size=BLOCK_SIZE,
            bucket=DECODES,
        )
        has_ended = lambda text: text[-1] in model.config.eos_token_ids  # with the prompt's own step
        ends = [
            0 if has_ended(texts[owners[row]]) else len(prompts[owners[row]]) + max_tokens for row in rows
        ]
        out = jattn.decode_loop(
            step,
            params,
            caches,
            metadata,
            jattn.pack_tokens([text[-1:] for text in live], DECODES),
            num_steps=LOOP_STEPS,
            sample=likeliest,
            stop_ids=model.config.eos_token_ids,
            max_lens=ends + [0] * (ROWS - len(rows)),
        )
        caches = out.caches
        is_running = np.asarray(out.metadata.seq_lens) > 0
        for nth, row in enumerate(rows):
            live[nth].extend(np.asarray(out.tokens)[nth, : int(out.num_tokens[nth])].tolist())
            owners[row] = owners[row] if is_running[nth] else -1


def main() -> None:
    model = jattn.models.load(TINY_MODEL, progress=False)
    prompts = ["def add(a, b):\n", "import os\nimport ", "class Point:\n", "x = [", "for i in ", "try:\n"]
    for tokens in serve(model, [model.tokenizer.encode(prompt).ids for prompt in prompts], max_tokens=32):
        print("---\n" + model.tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
