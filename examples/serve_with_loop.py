"""Serve a queue of prompts with `decode_loop`: one call decodes up to 16 tokens of every row."""

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
# Block ids of each row; block 0 is the padding's.
BLOCKS = [[1 + MAX_BLOCKS * row + i for i in range(MAX_BLOCKS)] for row in range(ROWS)]


def sample_greedily(logits: jax.Array, index: Any) -> jax.Array:
    """Return the most likely token of each row."""
    return jnp.argmax(logits, axis=-1)


def serve(model: jattn.models.Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return the tokens of each prompt and its greedy completion; a free row serves the next prompt."""
    graphdef, params = nnx.split(model)

    def step(params: Any, caches: Any, metadata: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graphdef, params)
        hidden, caches = model(tokens, caches, metadata, plan=model.plan(metadata, caches))
        return model.logits(hidden[metadata.last_token_indices]), caches

    prefill = jax.jit(step, donate_argnums=1)
    caches = model.create_caches(1 + ROWS * MAX_BLOCKS, block_size=BLOCK_SIZE)
    sequences = [[*prompt] for prompt in prompts]
    prompt_indices, next_prompt = [-1] * ROWS, 0  # Prompt index of each row; -1 means free.
    while True:
        for row in range(ROWS):
            if prompt_indices[row] < 0 and next_prompt < len(prompts):
                prompt_indices[row], next_prompt = next_prompt, next_prompt + 1
                tokens = sequences[prompt_indices[row]]
                metadata = jattn.build_batch_metadata(
                    [len(tokens)], [len(tokens)], [BLOCKS[row]], block_size=BLOCK_SIZE, bucket=PROMPT
                )
                logits, caches = prefill(params, caches, metadata, jattn.pack_tokens([tokens], PROMPT))
                tokens.append(int(sample_greedily(logits, 0)[0]))
        rows = [row for row in range(ROWS) if prompt_indices[row] >= 0]
        if not rows:
            return sequences
        running = [sequences[prompt_indices[row]] for row in rows]  # Their last tokens are not cached yet.
        metadata = jattn.build_batch_metadata(
            [1] * len(rows),
            [len(tokens) for tokens in running],
            [BLOCKS[row] for row in rows],
            block_size=BLOCK_SIZE,
            bucket=DECODES,
        )
        # A prompt may end with its first token, which the prefill generated.
        max_lens = [
            0 if tokens[-1] in model.config.eos_token_ids else len(prompts[prompt_indices[row]]) + max_tokens
            for row, tokens in zip(rows, running, strict=True)
        ]
        out = jattn.decode_loop(
            step,
            params,
            caches,
            metadata,
            jattn.pack_tokens([tokens[-1:] for tokens in running], DECODES),
            num_steps=LOOP_STEPS,
            sample=sample_greedily,
            stop_ids=model.config.eos_token_ids,
            max_lens=max_lens + [0] * (ROWS - len(rows)),
        )
        caches = out.caches
        is_running = np.asarray(out.metadata.seq_lens) > 0
        for i, row in enumerate(rows):
            running[i].extend(np.asarray(out.tokens)[i, : int(out.num_tokens[i])].tolist())
            prompt_indices[row] = prompt_indices[row] if is_running[i] else -1


def main() -> None:
    model = jattn.models.load(TINY_MODEL, progress=False)
    prompts = ["def add(a, b):\n", "import os\nimport ", "class Point:\n", "x = [", "for i in ", "try:\n"]
    for tokens in serve(model, [model.tokenizer.encode(prompt).ids for prompt in prompts], max_tokens=32):
        print("---\n" + model.tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
