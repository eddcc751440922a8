"""Gradients of attention over packed keys with the Mosaic GPU kernel varlen_backward."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn.cache import PackedKV
from jattn.implementations.mosaic_gpu.gathered_columns import (
    add_gathered_gradients,
    gather_kv,
    gathered_columns_spec,
    gathers_columns,
)
from jattn.implementations.mosaic_gpu.kernel_config import score_of
from jattn.implementations.mosaic_gpu.query_rows import heads_to_rows, num_rows_per_token, rows_to_heads
from jattn.implementations.mosaic_gpu.tile_lists import (
    PackedLens,
    backward_sizes,
    plan_backward_mask,
    why_not_backward_lists,
)
from jattn.implementations.region_inputs import OutputGradients, RegionInputs
from jattn.masks import Mask
from jattn.pytree import replace
from jattn.spec import AttentionSpec
from pallas_kernels import architectures, support
from pallas_kernels import varlen_backward as kernel
from pallas_kernels.shared import Interpret


def why_not_gradients(
    spec: AttentionSpec,
    dtypes: dict[str, DTypeLike],
    mask: Mask | None,
    *,
    is_in_order: bool,
    needs_slope_gradient: bool,
    needs_score_mod_gradient: bool,
    gpu: str = "9.0",
) -> str | None:
    """Return why varlen_backward does not support a region, from static facts alone; None if it does.

    Args:
        spec: Attention of the layer.
        dtypes: Dtypes of query, key and value by these names.
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        is_in_order: Whether the rows' keys are stored one row after another from the first key on.
        needs_slope_gradient: Whether a gradient of the ALiBi slopes is required.
        needs_score_mod_gradient: Whether a gradient of the score function's arrays is required.
        gpu: Compute capability that kernels are built for.
    """
    reason = support.why_not_architecture("varlen_backward", gpu)
    reason = reason or support.why_not_backward(dtypes=dtypes, head_dim=spec.head_dim, gpu=gpu)
    if reason is not None:
        return reason
    if not is_in_order:
        return "gradients over packed keys require PackedKV(is_in_order=True)"
    if needs_slope_gradient:
        return "there is no kernel for the gradient of ALiBi slopes"
    if needs_score_mod_gradient:
        return "there is no kernel for the gradients of a score function's arrays"
    if mask is None:
        return None
    sizes = kernel.default_sizes(spec.head_dim, deterministic=spec.deterministic, gpu=gpu)
    return why_not_backward_lists(mask, spec, sizes)


def gradients(
    inputs: RegionInputs, outputs: OutputGradients, *, interpret: Interpret = None
) -> tuple[Array, Array, Array]:
    """Compute the gradients of queries, keys and values; the gradient of sinks needs no kernel.

    Args:
        inputs: Inputs of the forward pass, for which why_not_gradients must be None.
        outputs: Results of the forward pass and their gradients.
        interpret: plgpu.InterpretGPUParams to run the kernel on a CPU, for tests.
    """
    kv, metadata, spec, mask, columns = inputs.kv, inputs.metadata, inputs.spec, inputs.mask, None
    assert isinstance(kv, PackedKV)
    if mask is not None and gathers_columns(mask, spec) and not _is_positional(inputs):
        columns, mask = mask.split_gathered()
    dq, dk, dv = _call_kernel(replace(inputs, mask=mask), outputs, interpret)
    if columns is None:
        return dq, dk, dv
    # `out` and `lse` cover all visible keys, so the gradients of both key sets simply add up.
    gathered_kv, positions = gather_kv(kv, metadata, columns)
    gathered = replace(inputs, kv=gathered_kv, spec=gathered_columns_spec(spec), mask=columns)
    gathered_dq, gathered_dk, gathered_dv = _call_kernel(gathered, outputs, interpret)
    dq = (dq.astype(jnp.float32) + gathered_dq.astype(jnp.float32)).astype(dq.dtype)
    dk = add_gathered_gradients(dk, gathered_dk, positions, kv.kv_start_loc)
    dv = add_gathered_gradients(dv, gathered_dv, positions, kv.kv_start_loc)
    return dq, dk, dv


class GradientPlan(NamedTuple):
    """Schedule and mask of a call of varlen_backward.

    Attributes:
        schedule: Key tiles, and the query tiles of a dq kernel.
        lists: Query tiles that attend to each key tile; None without a mask.
        mask: Mask of the pairs in partial tiles; None without a mask.
    """

    schedule: kernel.BackwardSchedule
    lists: kernel.BackwardTileLists | None = None
    mask: kernel.BackwardMask | None = None


def _call_kernel(
    inputs: RegionInputs, outputs: OutputGradients, interpret: Interpret
) -> tuple[Array, Array, Array]:
    """Call varlen_backward once."""
    sizes = choose_sizes(inputs)
    return planned_gradients(inputs, outputs, sizes, plan_gradients(inputs, sizes), interpret=interpret)


def choose_sizes(inputs: RegionInputs) -> kernel.BackwardSizes:
    """Return the sizes of varlen_backward for a region."""
    mean_len = inputs.query.shape[0] // max(len(inputs.metadata.seq_lens), 1)
    gpu = architectures.kernel_architecture(inputs.query)
    return backward_sizes(
        inputs.mask, inputs.spec, mean_len=mean_len, rows_per_token=_rows_per_token(inputs), gpu=gpu
    )


def plan_gradients(inputs: RegionInputs, sizes: kernel.BackwardSizes) -> GradientPlan:
    """Build the schedule and the tile lists of a call of varlen_backward. Works inside jit.

    Args:
        inputs: Inputs of the forward pass.
        sizes: Sizes of the kernels.
    """
    kv, spec, mask, rows = inputs.kv, inputs.spec, inputs.mask, _rows_per_token(inputs)
    assert isinstance(kv, PackedKV)
    num_rows, lens = inputs.query.shape[0] * rows, _lens(inputs, rows)
    kv_tokens, kv_heads, head_dim = kv.k.shape
    schedule = kernel.make_schedule(
        *lens, kv_tokens=kv_tokens, kv_heads=kv_heads, head_dim=head_dim, score=score_of(spec, rows),
        sizes=sizes, num_tokens=num_rows, has_lists=mask is not None,
    )  # fmt: skip
    if mask is None:
        return GradientPlan(schedule)
    lists, pair_mask = plan_backward_mask(
        mask, spec, lens, schedule,
        sizes=sizes, num_rows=num_rows, max_seq_len=kv.max_keys_per_row, is_aligned=kv.is_aligned,
        rows_per_token=rows, packs_blocks=not _is_positional(inputs),
    )  # fmt: skip
    return GradientPlan(schedule, lists, pair_mask)


def planned_gradients(
    inputs: RegionInputs,
    outputs: OutputGradients,
    sizes: kernel.BackwardSizes,
    plan: GradientPlan,
    *,
    interpret: Interpret,
) -> tuple[Array, Array, Array]:
    """Call varlen_backward with a plan from plan_gradients; see `gradients`."""
    kv, spec, score_mod, rows = inputs.kv, inputs.spec, inputs.score_mod, _rows_per_token(inputs)
    assert isinstance(kv, PackedKV)
    query, out, grad_out = (heads_to_rows(x, rows) for x in (inputs.query, outputs.out, outputs.grad_out))
    lse, grad_lse = outputs.lse, outputs.grad_lse
    if grad_lse is not None:  # the gradient of a row without keys may hold NaN
        grad_lse = heads_to_rows(jnp.where(jnp.isneginf(lse), 0.0, grad_lse).T, rows).T
    lse = heads_to_rows(lse.T, rows).T
    dq, dk, dv = kernel.varlen_backward(
        query, kv.k, kv.v, out, lse, grad_out,
        **_lens(inputs, rows)._asdict(), has_aligned_keys=kv.is_aligned, score=score_of(spec, rows),
        grad_lse=grad_lse, alibi_slopes=inputs.alibi_slopes,
        score_mod=None if score_mod is None else score_mod.for_kernels(),
        schedule=plan.schedule, lists=plan.lists, mask=plan.mask, deterministic=spec.deterministic,
        sizes=sizes, interpret=interpret,
    )  # fmt: skip
    return rows_to_heads(dq, rows), dk, dv


def _is_positional(inputs: RegionInputs) -> bool:
    """Return whether scores depend on positions, or heads, other than by the mask."""
    return inputs.alibi_slopes is not None or inputs.score_mod is not None


def _rows_per_token(inputs: RegionInputs) -> int:
    """Return how many query heads the kernel takes as rows of one head."""
    if inputs.mask is None or _is_positional(inputs):  # a row does not tell its head
        return 1
    num_tokens, num_reqs = len(inputs.query), len(inputs.metadata.seq_lens)
    return num_rows_per_token(inputs.mask, inputs.spec, num_tokens=num_tokens, num_reqs=num_reqs)


def _lens(inputs: RegionInputs, rows_per_token: int) -> PackedLens:
    """Return the location of the rows of the requests' queries, and of the keys."""
    kv, metadata = inputs.kv, inputs.metadata
    assert isinstance(kv, PackedKV)
    return PackedLens(metadata.query_start_loc * rows_per_token, metadata.seq_lens, kv.kv_start_loc)
