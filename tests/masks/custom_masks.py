"""Masks with arrays that a user defines: that of docs/sparsity.md, and ones with every lookup and none."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from jattn import masks
from tests.readme import examples, run

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "sparsity.md"
definition, _ = (block for block in examples(PAGE.read_text()) if block.heading == "A mask with arrays")
KeyRanges = run(definition, {})["KeyRanges"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EveryLookup(masks.Mask):
    """A mask that reads arrays by query, key, request and head; it has the default coverage."""

    by_query: jax.Array  # int [reqs, positions]
    by_key: jax.Array  # float [heads, positions]
    is_shown: jax.Array  # bool [positions]
    limit: jax.Array  # int [reqs]
    by_head: jax.Array  # int [heads]
    row_axes = {"by_query": 2, "by_key": 3, "is_shown": 2, "limit": 1, "by_head": 2}  # noqa: RUF012

    def visible(self, pairs):
        is_near = pairs.at_query(self.by_query).astype(jnp.float32) >= pairs.at_key(
            self.by_key, per_head=True
        )
        is_early = pairs.key < pairs.at_row(self.limit) + pairs.at_row(self.by_head, per_head=True)
        return (is_near | pairs.at_key(self.is_shown)) & is_early


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoLookup(masks.Mask):
    """A causal mask with an array that it does not read."""

    unread: jax.Array  # int [reqs, positions]
    row_axes = {"unread": 2}  # noqa: RUF012

    def visible(self, pairs):
        return pairs.key <= pairs.query
