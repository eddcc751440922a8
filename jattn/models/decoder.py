"""One decoder over paged caches for every family: what tells them apart is in the configuration."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Int32

from jattn.batch.check import require_no_context
from jattn.batch.context_parallel import ContextParallelAxis
from jattn.batch.metadata import BatchMetadata
from jattn.cache import CacheSpec, PagedCache
from jattn.masks import Mask
from jattn.models.collectives import Peers, of_first_device, summed
from jattn.models.config import DecoderConfig
from jattn.models.decoder_layer import DecoderLayer
from jattn.models.kv_cache_groups import ByReach, is_near, of_layer
from jattn.models.kv_scales import KVScales, static_scales
from jattn.models.layers import make_norm, matmul_precision, take_rows
from jattn.models.loading.generation_config import GenerationConfig
from jattn.models.mesh_padding import spread, whole_shape
from jattn.models.sharding import (
    create_on,
    mask_on_mesh,
    ranks_of,
    require_no_mask,
    run_on_mesh,
    take_part,
)
from jattn.models.specs import require_one_a_layer
from jattn.parallel import Axes, has_sharded_logits
from jattn.planning import Plan, plan, plan_on_rank
from pallas_kernels.checks import require


class Decoder(nnx.Module):
    """A causal language model: a step's tokens in, laid out as its metadata says; hidden states out.

    Attributes:
        mesh: The devices that it is spread over (`jattn.models.load`); None = it is not.
        cp_kv_cache_interleave_size: On a mesh with cp, neighbouring positions whose keys stay together.
        axis_name: Inside shard_map, where this is one device's part: the axes that the parts lie along.
        ranks: There, where the keys of a request lie on several devices: on which of them which do.
        peers: What sums and gathers over the devices need to be the kernels' (`use_peer_memory`); None = they
            are XLA's.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike | None = None,
        implementation: str | Sequence[str] | None = None,
    ) -> None:
        """Makes a decoder with random parameters; `jattn.models.load` makes one with a checkpoint's.

        Args:
            config: What to make.
            rngs: For the initial parameters.
            dtype: Of parameters and computation; None = the config's, or f32 where it says nothing.
            implementation: Of the attention, as in `jattn.attend`.
        """
        dtype = jnp.dtype((config.dtype or jnp.float32) if dtype is None else dtype)
        self.config = config
        self.mesh: Mesh | None = None
        self.axis_name: Axes | None = None
        self.ranks: ContextParallelAxis | None = None
        self.cp_kv_cache_interleave_size = 1
        self.peers: Peers | None = None
        self.tokenizer: Any = None
        self.kv_scales: KVScales | None = None
        self.generation_config = GenerationConfig()
        self.embed_tokens = nnx.Embed(
            config.padded_vocab_size,
            config.hidden_size,
            param_dtype=dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.layers = nnx.List(
            DecoderLayer(config, i, rngs=rngs, dtype=dtype, implementation=implementation)
            for i in range(config.num_hidden_layers)
        )
        norm = lambda: make_norm(config.norm, config.hidden_size, dtype=dtype)
        self.embedding_norm = norm() if config.has_embedding_norm else None
        self.norm = norm()
        how: Any = {"param_dtype": dtype, "rngs": rngs}
        self.embed_positions = (
            None
            if config.position_offset is None
            else nnx.Embed(config.max_position_embeddings + config.position_offset, config.hidden_size, **how)
        )
        how["use_bias"] = config.has_head_bias
        head = lambda: nnx.Linear(config.hidden_size, config.padded_vocab_size, **how)
        self.lm_head = None if config.tie_word_embeddings else head()

    @property
    def max_len(self) -> int:
        """The longest context, in tokens."""
        return self.config.max_position_embeddings

    @property
    def dtype(self) -> np.dtype:
        """Of the parameters, and so of the computation."""
        return jnp.dtype(self.embed_tokens.embedding.dtype)

    @property
    def near_layers(self) -> tuple[bool, ...]:
        """Which layers have a window or chunks, if only some do: they may have blocks of their own.

        `__call__` and `plan` then take ByReach; empty = all layers must share a block table.
        """
        near = tuple(is_near(layer.self_attn.spec) for layer in self.layers)
        return near if len({*near}) == 2 else ()

    def __call__(
        self,
        token_ids: Int[Array, " tokens"],
        caches: tuple[PagedCache, ...] | None,
        metadata: BatchMetadata | ByReach,
        *,
        positions: Int32[Array, " tokens"] | None = None,
        plan: Plan | ByReach | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], tuple[PagedCache, ...] | None]:
        """Runs a step.

        Args:
            token_ids: The step's tokens, laid out as the metadata says. Padding may hold any id.
            caches: One a layer (`create_caches`); donated: use those returned. None = no cache: every row's
                keys are this step's own (training, scoring), and no row has context.
            metadata: The step's metadata. ByReach: the same step's, over two block tables (`near_layers`).
            positions: Where tokens stand; None = metadata.positions.
            plan: The step's plan, if one was made; shared by all layers, or ByReach as the metadata is.

        Returns:
            Hidden states behind the last norm [tokens, hidden_size], for `logits`; and the caches with this
            step's keys and values in them.

        Raises:
            ValueError: There is not one cache a layer, or the step does not fit its metadata.
        """
        if caches is not None:
            require_one_a_layer("caches", caches, len(self.layers))
        else:
            require_no_context(metadata.far if isinstance(metadata, ByReach) else metadata)
        if self.mesh is not None:
            options, how = {"metadata": metadata, "positions": positions}, "caches"
            out: Any = run_on_mesh(self, "__call__", (token_ids,), caches, options, plan=plan, returns=how)
            return out
        if positions is None:
            positions = (metadata.far if isinstance(metadata, ByReach) else metadata).positions
        delta = self._first_delta(token_ids, positions)
        x = jnp.zeros_like(delta)  # a layer as any other comes first: no other kind of it is traced
        written: list[Any] = []
        for i, layer in enumerate(self.layers):
            cache = None if caches is None else caches[i]
            its_metadata, its_plan = (of_layer(of_step, layer.self_attn.spec) for of_step in (metadata, plan))
            x, delta, cache = layer(x, delta, cache, its_metadata, positions, its_plan)
            written.append(cache)
        if self.layers[0].takes_parts:
            delta = summed(delta, self.axis_name, None if caches is None else self.layers[0].peers)
        return self.norm(x + delta), None if caches is None else tuple(written)

    def embed(
        self, token_ids: Int[Array, " tokens"], positions: Int32[Array, " tokens"]
    ) -> Float[Array, "tokens hidden"]:
        """What the first layer is given: embeddings, scaled, placed, normalised where the config says so."""
        if self.mesh is not None:
            x: Array = run_on_mesh(self, "embed", (token_ids, positions))
            return x
        x = summed(self._part_of_embeddings(token_ids), self.axis_name, None)
        if self.embed_positions is not None and self.config.position_offset is not None:
            rows = positions + self.config.position_offset
            x = x + jnp.take(self.embed_positions.embedding[...], rows, axis=0, mode="clip")
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _part_of_embeddings(self, token_ids: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        """Embeddings, scaled; on a mesh those of this device's part of the vocabulary, others zero."""
        table = self.embed_tokens.embedding[...]
        if self.axis_name is None:
            x = take_rows(table, token_ids)
        else:
            x = take_part(table, token_ids, self.axis_name, self.config.vocab_size)
        if self.config.embedding_scale is None:
            return x
        return x * jnp.asarray(self.config.embedding_scale, x.dtype)  # rounded first, as in transformers

    def _first_delta(
        self, token_ids: Int[Array, " tokens"], positions: Int32[Array, " tokens"]
    ) -> Float[Array, "tokens hidden"]:
        """The first layer's delta: the embeddings, or this device's part of their sum."""
        if not self.layers[0].takes_parts:
            return self.embed(token_ids, positions)
        if self.embedding_norm is None and self.embed_positions is None:
            return self._part_of_embeddings(token_ids)
        return of_first_device(self.embed(token_ids, positions), self.axis_name)

    def plan(
        self,
        metadata: BatchMetadata | ByReach,
        caches: tuple[PagedCache, ...] | None,
        *,
        mask: Mask | None = None,
        common_prefix_len: Int[Array, ""] | int | None = None,
    ) -> Plan | ByReach:
        """The step's plan for all layers, or two; arguments as `__call__` and `jattn.plan` have them."""
        require_one_a_layer("caches", self.layers if caches is None else caches, len(self.layers))
        if self.mesh is not None:
            options = {"mask": mask, "common_prefix_len": common_prefix_len}
            made: Plan | ByReach = run_on_mesh(self, "plan", (metadata,), caches, options, returns="plan")
            return made
        if mask is not None and self.axis_name is not None:
            mask = mask_on_mesh(mask, self.config)
        layers = [layer.self_attn for layer in self.layers]
        how: dict[str, Any] = {"implementation": layers[0].implementation, "query_dtype": self.dtype}
        of_step: dict[str, Any] = {"mask": mask, "common_prefix_len": common_prefix_len}
        if self.ranks is not None and caches is not None:
            require_no_mask(self.ranks, mask)

        def plan_of(metadata: BatchMetadata, chosen: Sequence[int]) -> Plan:
            specs = [layers[i].spec for i in chosen]
            own = None if caches is None else [caches[i] for i in chosen]
            if self.ranks is not None and own is not None:
                ranks = self.ranks
                return plan_on_rank(metadata, specs, own, ranks, common_prefix_len=common_prefix_len, **how)
            return plan(metadata, specs, own, **how, **of_step)

        every = range(len(layers))
        if not isinstance(metadata, ByReach):
            return plan_of(metadata, every)
        of_reach = lambda near: [i for i in every if is_near(layers[i].spec) == near]
        return ByReach(plan_of(metadata.far, of_reach(False)), plan_of(metadata.near, of_reach(True)))

    def logits(self, hidden: Float[Array, "n hidden"]) -> Float32[Array, "n vocab"]:
        """Next-token scores of hidden states. A mesh has them cut by the vocabulary, if it divides that."""
        if self.mesh is None:
            scores = self._scores(hidden)
        elif has_sharded_logits(self):
            scores = run_on_mesh(self, "_scores", (hidden,), returns="columns")
        else:
            scores = run_on_mesh(self, "_gathered_scores", (hidden,))
        bias = None if self.lm_head is None or self.lm_head.bias is None else self.lm_head.bias[...]
        return logits_of(scores, bias, self.config)

    def _scores(self, hidden: Float[Array, "n hidden"]) -> Float32[Array, "n vocab"]:
        """The product with the vocabulary."""
        head = self.embed_tokens.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]
        precision = matmul_precision(hidden.dtype)
        return jnp.matmul(hidden, head, precision=precision, preferred_element_type=jnp.float32)

    def _gathered_scores(self, hidden: Float[Array, "n hidden"]) -> Float32[Array, "n vocab"]:
        """Inside shard_map, where devices' parts end with rows of zeros that are no tokens."""
        gathered = jax.lax.all_gather(self._scores(hidden), self.axis_name, axis=1, tiled=True)
        return gathered[:, : self.config.vocab_size]

    def spread(self, path: tuple[Any, ...], array: Any, shape: tuple[int, ...]) -> Any:
        """A parameter as this model has it, from what the same on one device has; its own stay as they are.

        Args:
            path: Of the parameter.
            array: A new one.
            shape: That this model's has.
        """
        is_its_own = array.shape == shape or array.shape != whole_shape(self.config, path, shape)
        return array if is_its_own else spread(self.config, path, np.asarray(array))

    def cache_specs(
        self,
        num_blocks: int | Sequence[int],
        *,
        block_size: int = 16,
        dtype: DTypeLike | None = None,
        layout: str = "NHD",
        quantization: str | None = None,
        skip_layers: Sequence[int] = (),
    ) -> tuple[CacheSpec, ...]:
        """One CacheSpec a layer.

        Args:
            num_blocks: As in `CacheSpec`, for all layers or one a layer.
            block_size: As in `CacheSpec`; on a mesh with cp each rank has 1 / cp of a block's tokens.
            dtype: As in `CacheSpec`; None = the model's.
            layout: As in `CacheSpec`.
            quantization: As in `CacheSpec`.
            skip_layers: Layers that are not quantised; negative numbers count from the last.

        Raises:
            ValueError: There is no such layer, num_blocks has not one entry a layer, blocks do not fall into
                equal parts, or as `CacheSpec`.
        """
        count = self.config.num_hidden_layers
        for layer in skip_layers:
            require(-count <= layer < count, "skip_layers", f"lie in [{-count}, {count})", layer)
        ranks = None if self.mesh is None else ranks_of(self.mesh, self.cp_kv_cache_interleave_size)
        if ranks is not None:
            ranks.local_block_size(block_size)
        skipped = {layer % count for layer in skip_layers}
        blocks = tuple(num_blocks) if isinstance(num_blocks, Sequence) else (num_blocks,) * count
        require_one_a_layer("num_blocks", blocks, count)
        spec = CacheSpec(
            num_blocks=blocks[0],
            block_size=block_size,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype if dtype is None else dtype,
            layout=layout,
            quantization=quantization,
        )
        plain = dataclasses.replace(spec, quantization=None)
        each = (plain if layer in skipped else spec for layer in range(count))
        return tuple(dataclasses.replace(one, num_blocks=n) for one, n in zip(each, blocks, strict=True))

    def create_caches(
        self,
        num_blocks: int | Sequence[int],
        *,
        block_size: int = 16,
        dtype: DTypeLike | None = None,
        layout: str = "NHD",
        quantization: str | None = None,
        skip_layers: Sequence[int] = (),
    ) -> tuple[PagedCache, ...]:
        """Empty caches, one a layer, with kv_scales where scales are static; arguments as `cache_specs`.

        Raises:
            ValueError: The quantisation needs scales per channel and kv_scales has none, or of another shape.

        Warns:
            CalibrationWarning: The quantisation has static scales and kv_scales lacks some: 1 is taken.
        """
        specs = self.cache_specs(
            num_blocks,
            block_size=block_size,
            dtype=dtype,
            layout=layout,
            quantization=quantization,
            skip_layers=skip_layers,
        )
        scales = static_scales(self.kv_scales, specs, num_replicas=self.config.num_kv_head_replicas)
        create = lambda: tuple(PagedCache.create(spec, **of) for spec, of in zip(specs, scales, strict=True))
        return create() if self.mesh is None else create_on(self.mesh, create)


def logits_of(
    scores: Float32[Array, "n vocab"], bias: Float[Array, " padded"] | None, config: DecoderConfig
) -> Float32[Array, "n vocab"]:
    """Scores with a bias, scaled, soft-capped, some hidden.

    Args:
        scores: Of each token of the vocabulary.
        bias: Of each, perhaps of some more behind them; None = none.
        config: The model's.
    """
    if bias is not None:
        scores = scores + bias[: config.vocab_size].astype(scores.dtype)[None, :]
    scores = scores if config.logit_scale is None else scores * config.logit_scale
    cap = config.final_logit_softcapping
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    if config.hidden_tokens:
        lowest = jnp.finfo(scores.dtype).min
        scores = scores.at[:, np.array(config.hidden_tokens)].set(lowest)
    return scores
