"""Names for the values that kernel bodies handle; JAX has no public types for most of them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

f32 = jnp.float32

type Ref = Any
"""A reference to global (`_g`) or shared (`_s`) memory in a kernel body, or a slice `ref.at[...]` of one."""

type Barriers = Any
"""A plgpu.Barrier in a kernel body: `num_barriers` barriers."""

type ScratchType = Any
"""An entry of scratch_types: plgpu.SMEM, plgpu.Barrier or plgpu.RefUnion; None for an absent entry."""

type Scalar = jax.Array
"""A traced number that is the same in all threads of a warpgroup."""

type Rows = jax.Array
"""A traced vector in registers with one number per row of a tile."""

type Columns = jax.Array
"""A traced vector in registers with one number per column of a tile."""

type Tile = jax.Array
"""A traced matrix in registers, distributed over the threads of a warpgroup."""

type Layout = Any
"""A plgpu.Layout, or a reduced, transposed or parametrized one."""

type Slice = Any
"""A pl.ds(...) with a traced start and a static size."""

type Index = tuple[Any, ...]
"""An argument of `ref.at[...]`: static or traced integers and slices."""

type Interpret = plgpu.InterpretGPUParams | None
"""Parameters of interpret mode, which runs a kernel on a CPU; None compiles for a GPU."""
