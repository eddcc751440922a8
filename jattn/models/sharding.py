"""A decoder on a mesh: how each parameter is sharded, and how each device runs its shard of the model.

Heads are sharded over the mesh's tp axis. The hidden widths of MLPs and experts are sharded over all devices,
so attention and MLP each need one all-reduce, after their last projection. The embedding and lm_head are
sharded by the vocabulary. Other parameters are small and replicated. Devices along cp have the same heads and
different parts of the KV cache.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jattn.batch.context_parallel import ContextParallelAxis
from jattn.cache import PagedCache
from jattn.masks import LocalStrided, Mask, shard_mask
from jattn.models.config import DecoderConfig
from jattn.models.kv_cache_groups import PerKVCacheGroup
from jattn.models.layers import AllHeadsNorm, take_rows
from jattn.models.mesh_padding import num_replicated_rows
from jattn.models.specs import MLPSpec
from jattn.parallel import ALL_AXES, CP, TP, Axes, cache_partition_specs, check_mesh
from jattn.parallel.context_parallel import check_alibi
from jattn.planning import Plan
from pallas_kernels.checks import require, unsupported

type Path = tuple[Any, ...]

# Partition specs by module and parameter name.
_BY_HEADS: dict[tuple[str, str], P] = {
    ("qkv_proj", "kernel"): P(None, TP),  # [hidden, kv_heads, group + 2, head_dim]
    ("qkv_proj", "bias"): P(TP),
    ("self_attn", "sinks"): P(TP),
    ("o_proj", "kernel"): P(TP),  # [q_heads * head_dim, hidden]
    ("q_norm", "weight"): P(
        TP
    ),  # [q_heads, head_dim]; a weight [head_dim] that all heads share is replicated
    ("k_norm", "weight"): P(TP),
}
_BY_WIDTH: dict[tuple[str, str], P] = {
    ("gate_up_proj", "kernel"): P(None, None, ALL_AXES),  # [hidden, 2, intermediate]
    ("gate_up_proj", "bias"): P(None, ALL_AXES),
    ("up_proj", "kernel"): P(None, ALL_AXES),
    ("up_proj", "bias"): P(ALL_AXES),
    ("down_proj", "kernel"): P(ALL_AXES),
    # Experts: [experts, 2, intermediate, hidden] and [experts, intermediate, hidden].
    ("gate_up_proj", "weight"): P(None, None, ALL_AXES),
    ("down_proj", "weight"): P(None, ALL_AXES),
}
_BY_VOCABULARY = {("embed_tokens", "embedding"): P(ALL_AXES), ("lm_head", "kernel"): P(None, ALL_AXES)}
_PARTITIONS = _BY_HEADS | _BY_WIDTH | _BY_VOCABULARY
# Biases of all-reduced outputs: one device adds them.
_ADDED_ONCE = (("o_proj", "bias"), ("down_proj", "bias"))


def partition_spec(path: Path, num_axes: int) -> P:
    """Return the partition spec of a parameter.

    Args:
        path: Path in the decoder's state, such as ("layers", 0, "self_attn", "o_proj", "kernel").
        num_axes: Number of axes of the parameter: an expert's bias has one more than an MLP's.
    """
    if path[0] == "peers":
        return P(TP, CP)
    if path[-2:] == ("gate_up_proj", "bias") and num_axes == 3:
        return P(None, None, ALL_AXES)
    if path[-2] in ("q_norm", "k_norm") and num_axes == 1:
        return P()
    return _PARTITIONS.get(path[-2:], P())


def kv_ranks(mesh: Mesh, interleave: int) -> ContextParallelAxis | None:
    """Return how the KV cache is split between context-parallel ranks; None = each device has all tokens."""
    ranks = ContextParallelAxis(axis_name=CP, size=mesh.shape[CP], interleave=interleave)
    return ranks if ranks.size > 1 else None


def check_divides(config: DecoderConfig, mesh: Mesh, interleave: int = 1) -> None:
    """Require that a model can be sharded over a mesh.

    Args:
        config: Configuration of the model.
        mesh: Mesh with axes tp and cp.
        interleave: Value of `cp_kv_cache_interleave_size`; see `load`.

    Raises:
        ValueError: If `mesh` is not a valid mesh, the number of query heads is not a multiple of its tp, the
            number of kv heads is neither a multiple nor a divisor of tp, or a width is not a multiple of the
            number of devices.
        NotImplementedError: If the model is valid and sharding it is not supported: with cp, ALiBi, or
            block-sparse patterns per head.
    """
    check_mesh(mesh)
    ranks = kv_ranks(mesh, interleave)
    for layer in config.layers if ranks is not None else ():
        assert ranks is not None
        check_alibi(layer.attention, ranks, has_slopes=layer.alibi_slopes is not None)
    tp = mesh.shape[TP]
    rule = f"be a multiple of the mesh's tp ({tp})"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    require(heads % tp == 0, "num_attention_heads", rule, heads)
    rule = f"be a multiple of the mesh's tp * cp ({mesh.size})"
    for layer in config.layers:
        _check_width(layer.mlp, rule, mesh.size)
    rule = f"be a multiple or a divisor of the mesh's tp ({tp})"
    require(kv_heads % tp == 0 or tp % kv_heads == 0, "num_key_value_heads", rule, kv_heads)
    for spec in config.attention_specs if ranks is not None and tp > 1 else ():
        if isinstance(spec.sparsity, LocalStrided) and not spec.sparsity.homo_head:
            reason = "patterns per head are not supported where both heads and the KV cache are sharded"
            raise unsupported(f"sparsity {spec.sparsity} with cp", reason, "Use tp=1 or cp=1")


def _check_width(mlp: Any, rule: str, num_devices: int) -> None:
    shared = None if isinstance(mlp, MLPSpec) else mlp.shared
    for spec in filter(None, (mlp, shared)):
        require(spec.intermediate_size % num_devices == 0, "intermediate_size", rule, spec.intermediate_size)


def parameter_sharding(mesh: Mesh, path: Path, num_axes: int) -> NamedSharding:
    """Return the sharding of a parameter on a mesh."""
    return NamedSharding(mesh, partition_spec(path, num_axes))


def shard_decoder_mask(mask: Mask, config: DecoderConfig) -> Mask:
    """Return this device's part of a mask over all heads, inside shard_map."""
    heads = config.num_attention_heads, config.num_key_value_heads // config.num_kv_head_replicas
    return shard_mask(mask, TP, config.tp, heads)


def require_no_mask(ranks: ContextParallelAxis, mask: Mask | None) -> None:
    """Require that a step with context parallelism has no mask in addition to its layers' masks.

    Raises:
        NotImplementedError: If `mask` is not None.
    """
    if mask is not None:
        reason = f"the KV cache of a request is split over {ranks.size} devices"
        feature = f"mask={type(mask).__name__} with cp"
        raise unsupported(feature, reason, "Pass mask=None, or load the model with cp=1")


def take_rows_sharded(
    table: Float[Array, "shard hidden"], token_ids: Int[Array, " tokens"], axis_name: Axes, vocab_size: int
) -> Float[Array, "tokens hidden"]:
    """Look up this device's shard of an embedding inside shard_map; ids of other shards give zeros.

    Ids out of range are clipped.
    """
    first = jax.lax.axis_index(axis_name) * len(table)
    ids = jnp.clip(token_ids, 0, vocab_size - 1) - first
    is_local = (ids >= 0) & (ids < len(table))
    rows = take_rows(table, ids)
    return jnp.where(is_local[:, None], rows, jnp.zeros((), rows.dtype))


def create_caches_on_mesh(mesh: Mesh, create: Any) -> tuple[PagedCache, ...]:
    """Call a function that creates caches, so that each device allocates only its shard."""
    partitions = [cache_partition_specs(cache) for cache in jax.eval_shape(create)]
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), tuple(partitions))
    caches: tuple[PagedCache, ...] = jax.jit(create, out_shardings=shardings)()
    return caches


def run_on_mesh(
    model: Any,
    method: str,
    arguments: tuple[Any, ...],
    caches: Any = None,
    options: Mapping[str, Any] | None = None,
    *,
    plan: Plan | PerKVCacheGroup | None = None,
    returns: str = "replicated",
) -> Any:
    """Run a decoder's method on its mesh, on each device with the device's shard of the model.

    A model without weights (`load_shapes`) can run methods that read no weights.

    Args:
        model: A Decoder on a mesh.
        method: Name of the method. It is called with the arguments and, if `options` is given, the caches and
            the options.
        arguments: Replicated positional arguments: arrays and pytrees.
        caches: The model's caches, or None.
        options: Replicated keyword arguments.
        plan: Plan that an earlier call with `returns="plan"` returned, or one per KV-cache group.
        returns: Kind of the method's result: "replicated"; "caches", a replicated value and caches;
            "columns", an array whose second axis is sharded; or "plan", a plan per rank, stacked along a new
            first axis of its arrays.
    """
    graphdef, state = nnx.split(model)
    paths, variables = zip(*nnx.to_flat_state(state), strict=True)
    values = tuple(variable.get_value() for variable in variables)
    shapes = tuple(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values)
    is_abstract = any(isinstance(value, jax.ShapeDtypeStruct) for value in values)
    assert model.mesh is not None
    replicas = model.config.num_kv_head_replicas
    run_spec = _RunSpec(
        graphdef, paths, tuple(map(type, variables)), shapes, model.mesh, method, returns, replicas
    )
    values = () if is_abstract else values
    return _run(values, caches, arguments, options, plan, run_spec=run_spec)


@dataclasses.dataclass(frozen=True)
class _RunSpec:
    """Static arguments of `run_on_mesh`: the model's structure and the method to run.

    Attributes:
        replicas: Number of neighbouring tp devices with the same kv heads.
    """

    graphdef: Any
    paths: tuple[Path, ...]
    variable_types: tuple[Any, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    mesh: Mesh
    method: str
    returns: str
    replicas: int


@functools.partial(jax.jit, static_argnames="run_spec")
def _run(values: Any, caches: Any, arguments: Any, options: Any, plan: Any, *, run_spec: _RunSpec) -> Any:
    nonempty, restore = _remove_empty_arrays((arguments, options))

    def run(values: Any, caches: Any, nonempty: Any, plan: Any) -> Any:
        method = getattr(_local_model(run_spec, values), run_spec.method)
        arguments, options = restore(nonempty)
        if options is None:
            return method(*arguments)
        if plan is not None:
            options = {**options, "plan": jax.tree.map(lambda array: array[0], plan)}
        result = method(*arguments, caches, **options)
        return jax.tree.map(lambda array: array[None], result) if run_spec.returns == "plan" else result

    # A model without weights has paths and no values.
    value_specs = tuple(
        partition_spec(path, value.ndim) for path, value in zip(run_spec.paths, values, strict=False)
    )
    cache_specs = jax.tree.map(
        cache_partition_specs, caches, is_leaf=lambda node: isinstance(node, PagedCache)
    )
    return jax.shard_map(
        run,
        mesh=run_spec.mesh,
        in_specs=(value_specs, cache_specs, P(), P(CP)),
        out_specs={
            "replicated": P(),
            "caches": (P(), cache_specs),
            "columns": P(None, ALL_AXES),
            "plan": P(CP),
        }[run_spec.returns],
        check_vma=False,  # kernels do not declare the axes over which their results vary
    )(values, caches, nonempty, plan)


def _remove_empty_arrays(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the arrays that have elements, and a function that rebuilds the tree from them inside shard_map.

    An array without elements, such as the block table of a step without a cache, crashes XLA's partitioner
    (jaxlib 0.11.2).
    """
    leaves, structure = jax.tree.flatten(tree)
    empty = [None if leaf.size else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def restore(nonempty: list[Any]) -> Any:
        remaining = iter(nonempty)
        restored = [next(remaining) if leaf is None else jnp.zeros(leaf.shape, leaf.dtype) for leaf in empty]
        return jax.tree.unflatten(structure, restored)

    return [leaf for leaf in leaves if leaf.size], restore


def _local_model(run_spec: _RunSpec, values: tuple[Any, ...]) -> Any:
    """Build this device's shard of the decoder, inside shard_map."""
    is_first = jax.lax.axis_index(ALL_AXES) == 0
    flat: dict[Path, Any] = {}
    for path, variable_type, value in zip(
        run_spec.paths, run_spec.variable_types, values or run_spec.shapes, strict=True
    ):
        if values and path[-2:] in _ADDED_ONCE:
            value = jnp.where(is_first, value, jnp.zeros_like(value))
        num_rows = num_replicated_rows(path, value.shape) if values and run_spec.replicas > 1 else 0
        if num_rows > 0:
            groups = tuple(itertools.batched(range(run_spec.mesh.shape[TP]), run_spec.replicas))
            value = _sum_replica_gradients(value, num_rows, groups)
        flat[path] = variable_type(value)
    model: Any = nnx.merge(run_spec.graphdef, nnx.from_flat_state(flat))
    tp = run_spec.mesh.shape[TP]
    model.ranks = kv_ranks(run_spec.mesh, model.cp_kv_cache_interleave_size)
    model.mesh, model.axis_name = None, ALL_AXES
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.LinearGeneral):
            module.out_features = module.kernel.shape[1:]
        if isinstance(module, AllHeadsNorm):
            module.axis_name = TP
    all_reduce_memory, lse_memory = None, None
    if model.peers is not None:
        all_reduce_memory = nnx.data(model.peers.all_reduce_memory.local)
        lse_memory = None if model.peers.lse_memory is None else nnx.data(model.peers.lse_memory.local)
    for layer in model.layers:
        layer.axis_name, layer.self_attn.ranks = ALL_AXES, model.ranks
        layer.peers = all_reduce_memory if layer.allow_kernel else None
        layer.self_attn.peers = lse_memory if layer.allow_kernel else None
        _cut_heads(layer.self_attn, tp, model.config)
    return model


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _sum_replica_gradients(value: Array, num_rows: int, groups: tuple[tuple[int, ...], ...]) -> Array:
    """Return a parameter whose replicated rows get the sum of the replicas' gradients and so stay equal.

    Args:
        value: This device's shard of the parameter.
        num_rows: Number of replicated rows: the last of the second-to-last axis.
        groups: Groups of devices along tp with the same replicas.
    """
    return value


def _sum_replica_gradients_bwd(
    num_rows: int, groups: tuple[tuple[int, ...], ...], _: None, grad_out: Array
) -> tuple[Array]:
    # `.at[]` is not used because its indices may be an array without elements: see `_remove_empty_arrays`.
    unique, replicated = jnp.split(grad_out, [grad_out.shape[-2] - num_rows], axis=-2)
    summed = jax.lax.psum(replicated, TP, axis_index_groups=[list(group) for group in groups])
    return (jnp.concatenate([unique, summed], axis=-2),)


_sum_replica_gradients.defvjp(lambda value, num_rows, groups: (value, None), _sum_replica_gradients_bwd)


def _cut_heads(attention: Any, tp: int, config: DecoderConfig) -> None:
    spec = attention.spec
    heads = {"num_q_heads": spec.num_q_heads // tp, "num_kv_heads": spec.num_kv_heads // tp}
    sparsity = None if spec.sparsity is None else shard_decoder_mask(spec.sparsity, config)
    attention.spec = dataclasses.replace(spec, **heads, sparsity=sparsity)
    if attention.alibi_slopes is not None:
        slopes = jnp.asarray(attention.alibi_slopes, jnp.float32).reshape(tp, -1)
        attention.alibi_slopes = nnx.data(slopes[jax.lax.axis_index(TP)])
