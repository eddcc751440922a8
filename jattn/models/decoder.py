"""The decoder of all model families over paged KV caches; the configuration says how they differ."""

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
from jattn.models.collectives import Peers, all_reduce_sum, zero_except_first_device
from jattn.models.config import DecoderConfig
from jattn.models.decoder_layer import DecoderLayer
from jattn.models.kv_cache_groups import PerKVCacheGroup, for_layer, uses_sliding_window
from jattn.models.kv_scales import KVScales, make_static_scales
from jattn.models.layers import make_norm, matmul_precision, take_rows
from jattn.models.mesh_padding import pad_to_mesh, unpadded_shape
from jattn.models.sharding import (
    create_caches_on_mesh,
    kv_ranks,
    require_no_mask,
    run_on_mesh,
    shard_decoder_mask,
    take_rows_sharded,
)
from jattn.models.specs import require_one_per_layer
from jattn.parallel import Axes, has_sharded_logits
from jattn.planning import Plan, plan, plan_on_rank
from pallas_kernels.checks import require


class Decoder(nnx.Module):
    """A causal language model that maps a step's tokens, in the layout of its metadata, to hidden states.

    Attributes:
        mesh: Mesh that the model is sharded over (`jattn.models.load`); None = it is on one device.
        cp_kv_cache_interleave_size: On a mesh with cp: number of consecutive positions per rank.
        axis_name: Inside shard_map, where this is one device's shard: mesh axes that it is sharded over.
        ranks: Inside shard_map with cp: how the KV cache is split between ranks.
        peers: Peer memory for all-reduces by kernels (`use_peer_memory`); None = XLA does all-reduces.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike | None = None,
        implementation: str | Sequence[str] | None = None,
    ) -> None:
        """Initialize a decoder with random parameters; `jattn.models.load` loads a checkpoint's.

        Args:
            config: Configuration of the decoder.
            rngs: Random streams for the initial parameters.
            dtype: Dtype of parameters and computation; None = the config's, or f32 if it has none.
            implementation: Requested attention implementations; see `jattn.attend`.
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
        self.generation_config = "{}"  # JSON of generation_config.json
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
        embedding_norm = embed_positions = lm_head = None
        if config.has_embedding_norm:
            embedding_norm = make_norm(config.norm, config.hidden_size, dtype=dtype)
        self.embedding_norm = embedding_norm
        self.norm = make_norm(config.norm, config.hidden_size, dtype=dtype)
        if config.position_offset is not None:
            num_positions = config.max_position_embeddings + config.position_offset
            embed_positions = nnx.Embed(num_positions, config.hidden_size, param_dtype=dtype, rngs=rngs)
        self.embed_positions = embed_positions
        if not config.tie_word_embeddings:
            lm_head = nnx.Linear(
                config.hidden_size,
                config.padded_vocab_size,
                use_bias=config.has_head_bias,
                param_dtype=dtype,
                rngs=rngs,
            )
        self.lm_head = lm_head

    @property
    def max_len(self) -> int:
        """Maximum context, in tokens."""
        return self.config.max_position_embeddings

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the parameters and of the computation."""
        return jnp.dtype(self.embed_tokens.embedding.dtype)

    @property
    def sliding_window_layers(self) -> tuple[bool, ...]:
        """Whether each layer has a sliding window or chunks; empty if all layers do, or none does.

        If not empty, `__call__` and `plan` accept metadata per KV-cache group (`PerKVCacheGroup`). Else all
        layers share a block table.
        """
        is_sliding = tuple([uses_sliding_window(layer.self_attn.spec) for layer in self.layers])
        return is_sliding if len({*is_sliding}) == 2 else ()

    def __call__(
        self,
        token_ids: Int[Array, " tokens"],
        caches: tuple[PagedCache, ...] | None,
        metadata: BatchMetadata | PerKVCacheGroup,
        *,
        positions: Int32[Array, " tokens"] | None = None,
        plan: Plan | PerKVCacheGroup | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], tuple[PagedCache, ...] | None]:
        """Run a step.

        Args:
            token_ids: Tokens of the step in the metadata's layout. Padding may hold any id.
            caches: KV cache per layer (`create_caches`). They are donated: use the returned ones. None = no
                caches: queries attend to the step's own keys only, for training and scoring.
            metadata: Metadata of the step. PerKVCacheGroup: one per KV-cache group
                (`sliding_window_layers`).
            positions: Position of each token; None = metadata.positions.
            plan: Plan of the step; shared by all layers, or one per KV-cache group.

        Returns:
            Hidden states after the last norm [tokens, hidden_size], for `logits`, and the caches with the
            step's keys and values written.

        Raises:
            ValueError: If the number of caches is not the number of layers, or the step does not match its
                metadata.
        """
        if caches is not None:
            require_one_per_layer("caches", caches, len(self.layers))
        else:
            require_no_context(metadata.full if isinstance(metadata, PerKVCacheGroup) else metadata)
        if self.mesh is not None:
            options = {"metadata": metadata, "positions": positions}
            out: Any = run_on_mesh(
                self, "__call__", (token_ids,), caches, options, plan=plan, returns="caches"
            )
            return out
        if positions is None:
            positions = (metadata.full if isinstance(metadata, PerKVCacheGroup) else metadata).positions
        sublayer_out = self._first_sublayer_out(token_ids, positions)
        x = jnp.zeros_like(sublayer_out)  # so that all layers have the same arguments and are traced once
        new_caches: list[Any] = []
        for i, layer in enumerate(self.layers):
            cache = None if caches is None else caches[i]
            spec = layer.self_attn.spec
            x, sublayer_out, cache = layer(
                x, sublayer_out, cache, for_layer(metadata, spec), positions, for_layer(plan, spec)
            )
            new_caches.append(cache)
        if self.layers[0].sublayer_out_is_partial:
            sublayer_out = all_reduce_sum(
                sublayer_out, self.axis_name, None if caches is None else self.layers[0].peers
            )
        return self.norm(x + sublayer_out), None if caches is None else tuple(new_caches)

    def embed(
        self, token_ids: Int[Array, " tokens"], positions: Int32[Array, " tokens"]
    ) -> Float[Array, "tokens hidden"]:
        """Return the first layer's input: token embeddings with scale, position embeddings and norm."""
        if self.mesh is not None:
            x: Array = run_on_mesh(self, "embed", (token_ids, positions))
            return x
        x = all_reduce_sum(self._local_embeddings(token_ids), self.axis_name, None)
        if self.embed_positions is not None and self.config.position_offset is not None:
            rows = positions + self.config.position_offset
            x = x + jnp.take(self.embed_positions.embedding[...], rows, axis=0, mode="clip")
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _local_embeddings(self, token_ids: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        """Return scaled embeddings; on a mesh zeros for tokens outside this device's vocabulary shard."""
        table = self.embed_tokens.embedding[...]
        if self.axis_name is None:
            x = take_rows(table, token_ids)
        else:
            x = take_rows_sharded(table, token_ids, self.axis_name, self.config.vocab_size)
        if self.config.embedding_scale is None:
            return x
        return x * jnp.asarray(self.config.embedding_scale, x.dtype)  # rounded first, as in transformers

    def _first_sublayer_out(
        self, token_ids: Int[Array, " tokens"], positions: Int32[Array, " tokens"]
    ) -> Float[Array, "tokens hidden"]:
        """Return the embeddings for the first layer, or this device's summand of them."""
        if not self.layers[0].sublayer_out_is_partial:
            return self.embed(token_ids, positions)
        if self.embedding_norm is None and self.embed_positions is None:
            return self._local_embeddings(token_ids)
        return zero_except_first_device(self.embed(token_ids, positions), self.axis_name)

    def plan(
        self,
        metadata: BatchMetadata | PerKVCacheGroup,
        caches: tuple[PagedCache, ...] | None,
        *,
        mask: Mask | None = None,
        common_prefix_len: Int[Array, ""] | int | None = None,
    ) -> Plan | PerKVCacheGroup:
        """Plan a step for all layers, or per KV-cache group; see `jattn.plan` for the arguments."""
        require_one_per_layer("caches", self.layers if caches is None else caches, len(self.layers))
        if self.mesh is not None:
            options = {"mask": mask, "common_prefix_len": common_prefix_len}
            planned: Plan | PerKVCacheGroup = run_on_mesh(
                self, "plan", (metadata,), caches, options, returns="plan"
            )
            return planned
        if mask is not None and self.axis_name is not None:
            mask = shard_decoder_mask(mask, self.config)
        layers = [layer.self_attn for layer in self.layers]
        implementation = layers[0].implementation
        if self.ranks is not None and caches is not None:
            require_no_mask(self.ranks, mask)

        def plan_layers(metadata: BatchMetadata, indices: Sequence[int]) -> Plan:
            specs = [layers[i].spec for i in indices]
            layer_caches = None if caches is None else [caches[i] for i in indices]
            if self.ranks is not None and layer_caches is not None:
                return plan_on_rank(
                    metadata,
                    specs,
                    layer_caches,
                    self.ranks,
                    common_prefix_len=common_prefix_len,
                    implementation=implementation,
                    query_dtype=self.dtype,
                )
            return plan(
                metadata,
                specs,
                layer_caches,
                mask=mask,
                common_prefix_len=common_prefix_len,
                implementation=implementation,
                query_dtype=self.dtype,
            )

        if not isinstance(metadata, PerKVCacheGroup):
            return plan_layers(metadata, range(len(layers)))
        is_sliding = [uses_sliding_window(layer.spec) for layer in layers]
        full = [i for i, sliding in enumerate(is_sliding) if not sliding]
        sliding = [i for i, sliding in enumerate(is_sliding) if sliding]
        return PerKVCacheGroup(plan_layers(metadata.full, full), plan_layers(metadata.sliding, sliding))

    def logits(self, hidden: Float[Array, "n hidden"]) -> Float32[Array, "n vocab"]:
        """Return the next-token logits of hidden states.

        On a mesh they are sharded by the vocabulary if the number of devices divides it.
        """
        if self.mesh is None:
            scores = self._scores(hidden)
        elif has_sharded_logits(self):
            scores = run_on_mesh(self, "_scores", (hidden,), returns="columns")
        else:
            scores = run_on_mesh(self, "_gather_scores", (hidden,))
        bias = None if self.lm_head is None or self.lm_head.bias is None else self.lm_head.bias[...]
        return _process_logits(scores, bias, self.config)

    def _scores(self, hidden: Float[Array, "n hidden"]) -> Float32[Array, "n vocab"]:
        """Multiply hidden states by the output projection."""
        head = self.embed_tokens.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]
        precision = matmul_precision(hidden.dtype)
        return jnp.matmul(hidden, head, precision=precision, preferred_element_type=jnp.float32)

    def _gather_scores(self, hidden: Float[Array, "n hidden"]) -> Float32[Array, "n vocab"]:
        """Gather the scores of all vocabulary shards inside shard_map and drop the vocabulary's padding."""
        gathered = jax.lax.all_gather(self._scores(hidden), self.axis_name, axis=1, tiled=True)
        return gathered[:, : self.config.vocab_size]

    def pad_to_mesh(self, path: tuple[Any, ...], array: Any, shape: tuple[int, ...]) -> Any:
        """Return a new value of a parameter, padded for this model's mesh where it is a single device's.

        Args:
            path: Path of the parameter in the model's state.
            array: New value, as on a single device or already padded.
            shape: Shape of this model's parameter.
        """
        is_padded = array.shape == shape or array.shape != unpadded_shape(self.config, path, shape)
        return array if is_padded else pad_to_mesh(self.config, path, np.asarray(array))

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
        """Return the CacheSpec of each layer.

        Args:
            num_blocks: Number of blocks, for all layers or per layer.
            block_size: Number of tokens per block. On a mesh with cp each rank stores 1 / cp of them.
            dtype: Dtype of the cache; None = the model's.
            layout: Layout of the cache, "NHD" or "HND".
            quantization: Quantization of the cache; see `CacheSpec`.
            skip_layers: Layers that are not quantized; negative numbers count from the last layer.

        Raises:
            ValueError: If `skip_layers` names a layer that does not exist, `num_blocks` does not have an
                entry per layer, cp does not divide the blocks, or `CacheSpec` refuses an argument.
        """
        count = self.config.num_hidden_layers
        for layer in skip_layers:
            require(-count <= layer < count, "skip_layers", f"lie in [{-count}, {count})", layer)
        ranks = None if self.mesh is None else kv_ranks(self.mesh, self.cp_kv_cache_interleave_size)
        if ranks is not None:
            ranks.local_block_size(block_size)
        skipped = {layer % count for layer in skip_layers}
        if isinstance(num_blocks, Sequence):
            blocks = tuple(num_blocks)
            require_one_per_layer("num_blocks", blocks, count)
        else:
            blocks = (num_blocks,) * count
        spec = CacheSpec(
            num_blocks=blocks[0],
            block_size=block_size,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype if dtype is None else dtype,
            layout=layout,
            quantization=quantization,
        )
        unquantized = dataclasses.replace(spec, quantization=None)
        specs = [unquantized if layer in skipped else spec for layer in range(count)]
        return tuple([dataclasses.replace(spec, num_blocks=n) for spec, n in zip(specs, blocks, strict=True)])

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
        """Create an empty cache per layer, with kv_scales as static scales; see `cache_specs`.

        Raises:
            ValueError: If the quantization requires scales per channel and kv_scales does not have them, or
                has them in another shape.

        Warns:
            CalibrationWarning: The quantization has static scales, and kv_scales lacks some. They become 1.
        """
        specs = self.cache_specs(
            num_blocks,
            block_size=block_size,
            dtype=dtype,
            layout=layout,
            quantization=quantization,
            skip_layers=skip_layers,
        )
        scales = make_static_scales(self.kv_scales, specs, num_replicas=self.config.num_kv_head_replicas)

        def create() -> tuple[PagedCache, ...]:
            pairs = zip(specs, scales, strict=True)
            return tuple([PagedCache.create(spec, **layer_scales) for spec, layer_scales in pairs])

        return create() if self.mesh is None else create_caches_on_mesh(self.mesh, create)


def _process_logits(
    scores: Float32[Array, "n vocab"], bias: Float[Array, " padded"] | None, config: DecoderConfig
) -> Float32[Array, "n vocab"]:
    """Add the bias to scores, then scale, soft-cap and suppress them as configured.

    Args:
        scores: Score per token of the vocabulary.
        bias: Bias per token, padded at the end; None = no bias.
        config: Configuration of the model.
    """
    if bias is not None:
        scores = scores + bias[: config.vocab_size].astype(scores.dtype)[None, :]
    scores = scores if config.logit_scale is None else scores * config.logit_scale
    cap = config.final_logit_softcapping
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    if config.suppressed_token_ids:
        lowest = jnp.finfo(scores.dtype).min
        scores = scores.at[:, np.array(config.suppressed_token_ids)].set(lowest)
    return scores
