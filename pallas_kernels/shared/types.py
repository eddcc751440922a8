"""Words for what a kernel handles; JAX has no public type for most of it, so annotations say it by these."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

type Ref = Any
"""Memory as a kernel body sees it, global (`_g`) or shared (`_s`): a reference, or its part `ref.at[...]`."""

type Barriers = Any
"""plgpu.Barrier as a kernel body sees it: `num_barriers` of them."""

type ScratchType = Any
"""What scratch_types are made of: plgpu.SMEM, plgpu.Barrier, plgpu.RefUnion; None where there is none."""

type Scalar = jax.Array
"""One traced number: the same in all threads that ask."""

type Rows = jax.Array
"""A traced number for each row of a tile, in registers."""

type Columns = jax.Array
"""A traced number for each column of a tile, in registers."""

type Tile = jax.Array
"""A traced matrix in registers, spread over the threads of a warpgroup."""

type Layout = Any
"""A plgpu.Layout, or one with arguments, reduced or transposed."""

type Slice = Any
"""pl.ds(...): traced begin, static size."""

type Index = tuple[Any, ...]
"""What `ref.at[...]` takes: numbers, traced or not, and slices."""

type Interpret = plgpu.InterpretGPUParams | None
"""How a kernel is interpreted on a CPU; None on a GPU."""
