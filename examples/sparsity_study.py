"""Compare masks on the tiny model: bits per byte, and the fraction of (query, key) pairs that are visible."""

import inspect
import pathlib

import jax
import jax.numpy as jnp

import jattn
from jattn.masks import BigBird, Causal, LocalStrided, Mask, Sinks, Window, density, streaming_heads

TOKENS = 512
MASKS: dict[str, Mask] = {
    "dense": Causal(),
    "window of 64": Window(left=63),
    "first 4 + window of 64": Sinks(4) | Window(left=63),
    "heads 0, 2 dense, others 4 + 64": streaming_heads((0, 2), num_first=4, num_recent=64),
    "local-strided 16": LocalStrided(block_size=16, local_blocks=4, vert_stride=4),
    "BigBird 16": BigBird(block_size=16, local_blocks=4, global_blocks=1, random_blocks=4),
}


def main() -> None:
    model = jattn.models.load(pathlib.Path(__file__).parent / "tiny_model", progress=False)
    text = jnp.asarray([*inspect.getsource(jattn.masks.positions).encode()[: TOKENS + 1]], jnp.int32)
    metadata = jattn.build_batch_metadata([TOKENS], [TOKENS], None)  # one sequence, no cache

    def bits_per_byte(text: jax.Array, mask: Mask) -> jax.Array:
        hidden, _ = model(text[:-1], None, metadata, plan=model.plan(metadata, None, mask=mask))
        scores = jax.nn.log_softmax(model.logits(hidden))
        return -jnp.take_along_axis(scores, text[1:, None], axis=1).mean() / jnp.log(2)

    for name, mask in MASKS.items():
        bits = jax.jit(bits_per_byte, static_argnames="mask")(text, mask=mask)
        visible_fraction = density(mask, TOKENS, TOKENS, num_q_heads=model.config.num_attention_heads)
        print(f"{name:32}  density {visible_fraction:.2f}  {bits:.3f} bits per byte")


if __name__ == "__main__":
    main()
