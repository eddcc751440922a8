"""A decoder on a mesh: which part of each parameter a device holds, and the model that it runs of them.

Heads are cut by the mesh's tp, the widths inside an MLP or an expert by all of its devices, so attention and
MLP each need one sum over all, behind their last product. The embedding and lm_head are cut by the
vocabulary. The rest is small, and every device has it. Devices along cp have the same heads, and other keys.
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
from jattn.models.kv_cache_groups import ByReach
from jattn.models.layers import AllHeadsNorm, take_rows
from jattn.models.mesh_padding import num_copied_rows
from jattn.models.specs import MLPSpec
from jattn.parallel import ALL_AXES, CP, TP, Axes, cache_partition_specs, check_mesh
from jattn.parallel.context_parallel import check_alibi
from jattn.planning import Plan
from pallas_kernels.checks import require, unsupported

type Path = tuple[Any, ...]

# By module and parameter.
_BY_HEADS: dict[tuple[str, str], P] = {
    ("qkv_proj", "kernel"): P(None, TP),  # [hidden, kv_heads, group + 2, head_dim]
    ("qkv_proj", "bias"): P(TP),
    ("self_attn", "sinks"): P(TP),
    ("o_proj", "kernel"): P(TP),  # [q_heads * head_dim, hidden]
    ("q_norm", "weight"): P(TP),  # [q_heads, head_dim]; of one for each head no device has a part
    ("k_norm", "weight"): P(TP),
}
_BY_WIDTH: dict[tuple[str, str], P] = {
    ("gate_up_proj", "kernel"): P(None, None, ALL_AXES),  # [hidden, 2, intermediate]
    ("gate_up_proj", "bias"): P(None, ALL_AXES),
    ("up_proj", "kernel"): P(None, ALL_AXES),
    ("up_proj", "bias"): P(ALL_AXES),
    ("down_proj", "kernel"): P(ALL_AXES),
    # Of experts: [experts, 2, intermediate, hidden] and [experts, intermediate, hidden].
    ("gate_up_proj", "weight"): P(None, None, ALL_AXES),
    ("down_proj", "weight"): P(None, ALL_AXES),
}
_BY_VOCABULARY = {("embed_tokens", "embedding"): P(ALL_AXES), ("lm_head", "kernel"): P(None, ALL_AXES)}
_PARTITIONS = _BY_HEADS | _BY_WIDTH | _BY_VOCABULARY
# What is added to sums over the devices: one of them adds it.
_OF_SUMS = (("o_proj", "bias"), ("down_proj", "bias"))


def parameter_partition(path: Path, num_axes: int) -> P:
    """Which axis of a parameter is cut, if any.

    Args:
        path: In the decoder's state, such as ("layers", 0, "self_attn", "o_proj", "kernel").
        num_axes: Of the parameter: an expert's bias has one more than an MLP's.
    """
    if path[0] == "peers":
        return P(TP, CP)
    if path[-2:] == ("gate_up_proj", "bias") and num_axes == 3:
        return P(None, None, ALL_AXES)
    if path[-2] in ("q_norm", "k_norm") and num_axes == 1:
        return P()
    return _PARTITIONS.get(path[-2:], P())


def ranks_of(mesh: Mesh, interleave: int) -> ContextParallelAxis | None:
    """Where the keys of requests lie on a mesh, for what runs in shard_map; None = each device has all."""
    ranks = ContextParallelAxis(axis_name=CP, size=mesh.shape[CP], interleave=interleave)
    return ranks if ranks.size > 1 else None


def check_divides(config: DecoderConfig, mesh: Mesh, interleave: int = 1) -> None:
    """A model must fall into as many equal parts as the mesh's tp.

    Args:
        config: The model's.
        mesh: The mesh.
        interleave: As `cp_kv_cache_interleave_size` of `load`.

    Raises:
        ValueError: The mesh is none, query heads are no multiple of its tp, kv heads neither a multiple nor a
            divisor, or a width no multiple of its devices.
        NotImplementedError: The model is right and cannot be cut here: ALiBi, or heads with patterns of their
            own, between keys of several devices.
    """
    check_mesh(mesh)
    ranks = ranks_of(mesh, interleave)
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
            reason = "each device would need the pattern of its own heads among keys of several devices"
            raise unsupported(f"sparsity {spec.sparsity} with cp", reason, "Take tp=1, or cp=1")


def _check_width(mlp: Any, rule: str, parts: int) -> None:
    shared = None if isinstance(mlp, MLPSpec) else mlp.shared
    for spec in filter(None, (mlp, shared)):
        require(spec.intermediate_size % parts == 0, "intermediate_size", rule, spec.intermediate_size)


def sharding_of(mesh: Mesh, path: Path, num_axes: int) -> NamedSharding:
    """Where a mesh holds a parameter."""
    return NamedSharding(mesh, parameter_partition(path, num_axes))


def mask_on_mesh(mask: Mask, config: DecoderConfig) -> Mask:
    """A mask of all heads as each device sees it, inside shard_map."""
    heads = config.num_attention_heads, config.num_key_value_heads // config.num_kv_head_replicas
    return shard_mask(mask, TP, config.tp, heads)


def require_no_mask(ranks: ContextParallelAxis, mask: Mask | None) -> None:
    """A step of a model whose keys lie on several ranks must have no mask but its layers'.

    Raises:
        NotImplementedError: It has one.
    """
    if mask is not None:
        reason = f"the keys of a request lie on {ranks.size} devices"
        what = f"mask={type(mask).__name__} with cp"
        raise unsupported(what, reason, "Leave it None, or load with cp=1")


def take_part(
    table: Float[Array, "part hidden"], token_ids: Int[Array, " tokens"], axis_name: Axes, vocab_size: int
) -> Float[Array, "tokens hidden"]:
    """Rows of this device's part of an embedding, inside shard_map, zeros for ids of other parts.

    Ids beyond the vocabulary are clipped.
    """
    first = jax.lax.axis_index(axis_name) * len(table)
    ids = jnp.clip(token_ids, 0, vocab_size - 1) - first
    is_here = (ids >= 0) & (ids < len(table))
    rows = take_rows(table, ids)
    return jnp.where(is_here[:, None], rows, jnp.zeros((), rows.dtype))


def create_on(mesh: Mesh, create: Any) -> tuple[PagedCache, ...]:
    """What makes caches, run so that each device makes only what it holds."""
    partitions = [cache_partition_specs(cache) for cache in jax.eval_shape(create)]
    places = jax.tree.map(functools.partial(NamedSharding, mesh), tuple(partitions))
    caches: tuple[PagedCache, ...] = jax.jit(create, out_shardings=places)()
    return caches


# --------------------------------------------------------------------------------------- running
def run_on_mesh(
    model: Any,
    method: str,
    arguments: tuple[Any, ...],
    caches: Any = None,
    options: Mapping[str, Any] | None = None,
    *,
    plan: Plan | ByReach | None = None,
    returns: str = "whole",
) -> Any:
    """Runs a method of a decoder on its mesh: each device that of its own part of the model.

    A model of shapes (`load_shapes`) runs what asks for no weights.

    Args:
        model: A Decoder on a mesh.
        method: Its name. It is given the arguments, the caches if there are options, and these.
        arguments: Arrays and pytrees that all devices have whole.
        caches: The model's caches, or None.
        options: As arguments, by name.
        plan: As `returns="plan"` gives it, for a method that takes one; or two, by reach.
        returns: What the method's result is: "whole", what all devices have; "caches", such a thing and
            caches; "columns", of which each device has its own; or "plan", of which each rank has its own,
            along a first axis of all its arrays.
    """
    graphdef, state = nnx.split(model)
    paths, variables = zip(*nnx.to_flat_state(state), strict=True)
    values = tuple(variable.get_value() for variable in variables)
    shapes = tuple(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values)
    is_abstract = any(isinstance(value, jax.ShapeDtypeStruct) for value in values)
    assert model.mesh is not None
    replicas = model.config.num_kv_head_replicas
    how = _How(graphdef, paths, tuple(map(type, variables)), shapes, model.mesh, method, returns, replicas)
    values = () if is_abstract else values
    return _run(values, caches, arguments, options, plan, how=how)


@dataclasses.dataclass(frozen=True)
class _How:
    """What is static of a run: the model's structure, where its parameters are, and what to run.

    Attributes:
        replicas: So many neighbours of tp have the same kv heads.
    """

    graphdef: Any
    paths: tuple[Path, ...]
    kinds: tuple[Any, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    mesh: Mesh
    method: str
    returns: str
    replicas: int


@functools.partial(jax.jit, static_argnames="how")
def _run(values: Any, caches: Any, arguments: Any, options: Any, plan: Any, *, how: _How) -> Any:
    given, with_empty = _without_empty((arguments, options))

    def run(values: Any, caches: Any, given: Any, plan: Any) -> Any:
        method = getattr(_own_part(how, values), how.method)
        arguments, options = with_empty(given)
        if options is None:
            return method(*arguments)
        if plan is not None:
            options = {**options, "plan": jax.tree.map(lambda array: array[0], plan)}
        made = method(*arguments, caches, **options)
        return jax.tree.map(lambda array: array[None], made) if how.returns == "plan" else made

    each = zip(how.paths, values, strict=False)  # no values of a model of shapes
    of_values = tuple(parameter_partition(path, value.ndim) for path, value in each)
    is_cache = lambda node: isinstance(node, PagedCache)
    of_caches = jax.tree.map(cache_partition_specs, caches, is_leaf=is_cache)
    return jax.shard_map(
        run,
        mesh=how.mesh,
        in_specs=(of_values, of_caches, P(), P(CP)),
        out_specs={"whole": P(), "caches": (P(), of_caches), "columns": P(None, ALL_AXES), "plan": P(CP)}[
            how.returns
        ],
        check_vma=False,  # kernels do not say over which axes their results vary
    )(values, caches, given, plan)


def _without_empty(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays that hold something, and what makes the tree of these again, inside shard_map.

    An array without elements, such as the block table of a step without a cache, ends the process where XLA's
    partitioner meets it (jaxlib 0.11.2).
    """
    leaves, structure = jax.tree.flatten(tree)
    empty = [None if leaf.size else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def with_empty(given: list[Any]) -> Any:
        rest = iter(given)
        every = [next(rest) if one is None else jnp.zeros(one.shape, one.dtype) for one in empty]
        return jax.tree.unflatten(structure, every)

    return [leaf for leaf in leaves if leaf.size], with_empty


def _own_part(how: _How, values: tuple[Any, ...]) -> Any:
    """The decoder of one device, inside shard_map: its heads, its widths, its part of the vocabulary."""
    is_first = jax.lax.axis_index(ALL_AXES) == 0
    of_first = lambda value: jnp.where(is_first, value, jnp.zeros_like(value))
    flat: dict[Path, Any] = {}
    for path, kind, value in zip(how.paths, how.kinds, values or how.shapes, strict=True):
        value = of_first(value) if values and path[-2:] in _OF_SUMS else value
        num_rows = num_copied_rows(path, value.shape) if values and how.replicas > 1 else 0
        if num_rows > 0:
            groups = tuple(itertools.batched(range(how.mesh.shape[TP]), how.replicas))
            value = _with_gradient_of_all(value, num_rows, groups)
        flat[path] = kind(value)
    model: Any = nnx.merge(how.graphdef, nnx.from_flat_state(flat))
    tp = how.mesh.shape[TP]
    model.ranks = ranks_of(how.mesh, model.cp_kv_cache_interleave_size)
    model.mesh, model.axis_name = None, ALL_AXES
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.LinearGeneral):
            module.out_features = module.kernel.shape[1:]
        if isinstance(module, AllHeadsNorm):
            module.axis_name = TP
    here = lambda arrays: None if arrays is None else nnx.data(arrays.here)
    sums, ranks = (None, None) if model.peers is None else map(here, (model.peers.sums, model.peers.ranks))
    for layer in model.layers:
        layer.axis_name, layer.self_attn.ranks = ALL_AXES, model.ranks
        layer.peers, layer.self_attn.peers = (sums, ranks) if layer.may_take_kernel else (None, None)
        _cut_heads(layer.self_attn, tp, model.config)
    return model


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _with_gradient_of_all(value: Array, num_rows: int, groups: tuple[tuple[int, ...], ...]) -> Array:
    """A parameter, of which each copy of some rows gets the gradient of all copies: so they stay alike.

    Args:
        value: This device's part.
        num_rows: So many, the last ones of its last axis but one, are other devices', too.
        groups: Devices along tp with the same copies.
    """
    return value


def _sum_of_copies(num_rows: int, groups: tuple[tuple[int, ...], ...], _: None, grad: Array) -> tuple[Array]:
    # Without `.at[]`, whose indices may be an array without elements: see `_without_empty`.
    own, shares = jnp.split(grad, [grad.shape[-2] - num_rows], axis=-2)
    summed = jax.lax.psum(shares, TP, axis_index_groups=[list(group) for group in groups])
    return (jnp.concatenate([own, summed], axis=-2),)


_with_gradient_of_all.defvjp(lambda value, num_rows, groups: (value, None), _sum_of_copies)


def _cut_heads(attention: Any, tp: int, config: DecoderConfig) -> None:
    spec = attention.spec
    heads = {"num_q_heads": spec.num_q_heads // tp, "num_kv_heads": spec.num_kv_heads // tp}
    sparsity = None if spec.sparsity is None else mask_on_mesh(spec.sparsity, config)
    attention.spec = dataclasses.replace(spec, **heads, sparsity=sparsity)
    if attention.alibi_slopes is not None:
        slopes = jnp.asarray(attention.alibi_slopes, jnp.float32).reshape(tp, -1)
        attention.alibi_slopes = nnx.data(slopes[jax.lax.axis_index(TP)])
