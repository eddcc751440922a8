"""What the engine compiles: a batch through the model, to the next token of each row."""

from collections.abc import Sequence
from typing import Any

from flax import nnx

from jattn.attend import choose_implementation
from jattn.graphs import GraphStep
from jattn.module import PagedAttention
from jattn.plan import plan
from jattn.serving.sampler import sample


def make_step(graphdef: Any) -> GraphStep:
    """The step that is compiled: from a batch to the next token of each row, and the caches.

    Args:
        graphdef: Of the model, from `nnx.split`; the params are its state.
    """

    def step(
        params: Any, caches: Any, metadata: Any, token_ids: Any, sampling: Any, num_generated: Any
    ) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params)
        shared = plan(metadata, model.config.attention_specs)
        hidden, caches = model(token_ids, caches, metadata, plan=shared)
        logits = model.logits(hidden[metadata.last_token_indices])
        return sample(logits, sampling, num_generated), caches

    return step


def with_implementation(model: Any, implementation: str | Sequence[str] | None) -> Any:
    """The model over the same arrays, its attention by `implementation`; the given one is left as it is."""
    if implementation is None:
        return model
    choose_implementation(implementation)  # raises now, not in the first step
    model = nnx.merge(*nnx.split(model))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, PagedAttention):
            module.implementation = implementation if isinstance(implementation, str) else (*implementation,)
    return model
