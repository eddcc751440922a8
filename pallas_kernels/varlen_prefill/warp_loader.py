"""The loads of prefill on GPUs without TMA: the computing warps fill the pipeline by cp.async."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ptx.cp_async import WARPS, commit_copies, copy_token_rows, wait_for_team, warp_index
from pallas_kernels.ptx.cp_async_paged import copy_block_rows
from pallas_kernels.shared.paged_kv import BlockTableRef
from pallas_kernels.shared.types import Barriers, Ref, Scalar
from pallas_kernels.varlen_prefill.spec import PrefillInputs, PrefillSpec, WarpPrefillSmem
from pallas_kernels.varlen_prefill.tile_scheduler import PrefillWorkTile, packed_heads


class KvLocation(NamedTuple):
    """The location of a warp's rows of a KV tile in global memory.

    Attributes:
        blocks: Block id of each run of tokens among the warp's rows; empty if keys are packed.
        first: Index of the runs' first token within its block, or of the tile's first row of packed keys.
    """

    blocks: tuple[Scalar, ...]
    first: Scalar


class NextLoads(NamedTuple):
    """The next loads of a `WarpPipeline`, located ahead so that the latency passes during a tile.

    Attributes:
        second: Location of the values (`WarpPipeline.second`) that are loaded next.
        first: Location of the keys (`WarpPipeline.first`) that are loaded next: one tile further.
        entry: Entry of the tile after that, see PrefillWorkTile.entry.
    """

    second: KvLocation
    first: KvLocation
    entry: Scalar


class WarpPipeline:
    """The stages of keys and values of a thread block, which its warps fill by cp.async.

    Of the keys and the values of a tile, those in `first` are read first, and those in `second` last: here
    keys, then values. All warpgroups call the same methods in the same order: for each work tile `start`,
    then for each of its KV tiles `wait_first` and `wait_second`. Each call waits for all warpgroups, which
    thus have read what they waited for in the previous call: `wait_first` of tile i refills the stage of the
    values of tile i - 1, and `wait_second` that of the keys of tile i. The groups of copies are, in order:
    the queries with the keys of tile 0; then values and keys in turns. So at each wait `2 * stages - 2`
    groups are younger than the one waited for. Past the last tile groups are empty.

    Attributes:
        first: Stages of what is read first, and the array that it is loaded from.
        second: Stages and array of what is read last.
    """

    def __init__(
        self,
        inputs: PrefillInputs,
        smem: WarpPrefillSmem,
        barrier: Barriers,
        spec: PrefillSpec,
        wg: Scalar,
    ):
        self.query_g, self.kv, self.smem, self.spec, self.wg = (
            inputs.query.rows,
            inputs.kv,
            smem,
            spec,
            wg,
        )
        self.barrier, self.tiling = barrier, spec.shape.cache_tiling
        self.first, self.second = (smem.k, inputs.kv.k), (smem.v, inputs.kv.v)
        self.blocks = (
            None if self.tiling is None else BlockTableRef(self.kv.block_table, self.tiling.block_size)
        )
        # In interpret mode the first warpgroup copies whole tiles.
        self.num_warps = 1 if spec.is_interpreted else WARPS * spec.sizes.warpgroups
        self.warp = warp_index(num_warps=self.num_warps, is_interpreted=spec.is_interpreted)

    def stage(self, i: Scalar) -> Scalar:
        """Return the index of the stage that holds the keys and values of a work tile's KV tile i."""
        stages = self.spec.sizes.stages
        return lax.rem(i, jnp.int32(stages)) if stages > 1 else i * 0

    def start(self, work_tile: PrefillWorkTile) -> NextLoads:
        """Load the queries and the first KV tiles of a work tile."""
        stages = self.spec.sizes.stages
        # All warpgroups have read the previous work tile's keys, values and queries.
        self._wait(num_pending=0)
        locations = [self._locate(work_tile, self._entry(work_tile, jnp.int32(i))) for i in range(stages + 1)]
        self._copy_queries(work_tile)
        for i in range(stages):
            if i > 0:
                self._load(*self.second, work_tile, jnp.int32(i - 1), locations[i - 1])
            self._load(*self.first, work_tile, jnp.int32(i), locations[i])
        entry = self._entry(work_tile, jnp.int32(stages + 1))
        return NextLoads(locations[stages - 1], locations[stages], entry)

    def wait_first(self, work_tile: PrefillWorkTile, i: Scalar, loads: NextLoads) -> Scalar:
        """Wait for `first` of KV tile i, load `second` of tile i + stages - 1, and return tile i's stage."""
        stages = self.spec.sizes.stages
        self._wait(num_pending=2 * stages - 2)
        self._load(*self.second, work_tile, i + (stages - 1), loads.second)
        return self.stage(i)

    def wait_second(self, work_tile: PrefillWorkTile, i: Scalar, loads: NextLoads) -> NextLoads:
        """Wait for `second` of KV tile i, and load `first` of tile i + stages."""
        stages = self.spec.sizes.stages
        self._wait(num_pending=2 * stages - 2)
        self._load(*self.first, work_tile, i + stages, loads.first)
        entry = self._entry(work_tile, i + (stages + 2))
        return NextLoads(loads.first, self._locate(work_tile, loads.entry), entry)

    def skip(self, work_tile: PrefillWorkTile, first: Scalar, end: Scalar, loads: NextLoads) -> NextLoads:
        """Take part in the loads of KV tiles [first, end) without reading them."""

        def skip_tile(i: Scalar, loads: NextLoads) -> NextLoads:
            self.wait_first(work_tile, i, loads)
            return self.wait_second(work_tile, i, loads)

        return lax.fori_loop(first, end, skip_tile, loads)

    def _wait(self, *, num_pending: int) -> None:
        num, is_interpreted = self.spec.sizes.warpgroups, self.spec.is_interpreted
        wait_for_copies(self.barrier, num_pending, num, is_interpreted=is_interpreted)

    def _entry(self, work_tile: PrefillWorkTile, i: Scalar) -> Scalar:
        """Return entry i, or the last one if there are fewer."""
        return work_tile.entry(jnp.minimum(i, jnp.maximum(work_tile.num - 1, 0)))

    def _locate(self, work_tile: PrefillWorkTile, entry: Scalar) -> KvLocation:
        """Return where the warp's rows of an entry's KV tile are."""
        tiling, tile_kv = self.tiling, self.spec.sizes.tile_kv
        first_key = work_tile.kv_tile_index(entry) * tile_kv
        if tiling is None or self.blocks is None:
            return KvLocation((), work_tile["kv_start"] - work_tile.alignment_offset + first_key)
        # The padding after the last request has no row in the block table.
        req = jnp.minimum(work_tile["req"], self.kv.block_table.shape[0] - 1)
        visible = self.blocks.visible_blocks(
            req, work_tile.first_key_with_block, work_tile.end_key_with_block, is_checked=True
        )
        warp_rows, size = tile_kv // self.num_warps, jnp.int32(tiling.block_size)
        first_key = first_key + self.warp * warp_rows
        num_runs = max(warp_rows // tiling.block_size, 1)
        blocks = visible.ids(lax.div(first_key, size), num_runs)
        return KvLocation(tuple(blocks), lax.rem(first_key, size))

    def _load(
        self, stages_s: Ref, kv_g: Ref, work_tile: PrefillWorkTile, i: Scalar, location: KvLocation
    ) -> None:
        """Start to load keys or values of KV tile i; past the last tile, nothing."""
        tiling, num_warps, is_interpreted = self.tiling, self.num_warps, self.spec.is_interpreted
        kv_head = work_tile.kv_head
        tile_s, is_loaded = stages_s.at[self.stage(i)], i < work_tile.num
        if is_interpreted:
            is_loaded = is_loaded & (self.wg == 0)

        @pl.when(is_loaded)
        def _() -> None:
            if tiling is None:
                copy_token_rows(
                    tile_s, kv_g, location.first, kv_head, head=self.spec.shape.head,
                    rows_per_head=self.spec.sizes.tile_kv, num_warps=num_warps, is_interpreted=is_interpreted,
                )  # fmt: skip
            else:
                copy_block_rows(
                    tile_s, kv_g, list(location.blocks), location.first, kv_head,
                    tiling=tiling, num_warps=num_warps, is_interpreted=is_interpreted,
                )  # fmt: skip

        commit_copies(is_interpreted=is_interpreted)

    def _copy_queries(self, work_tile: PrefillWorkTile) -> None:
        """Start to copy the queries of the warpgroup."""
        self._copy_rows(self.smem.query, self.query_g, work_tile)

    def _copy_rows(self, to_s: Ref, rows_g: Ref, work_tile: PrefillWorkTile) -> None:
        """Start to copy the warpgroup's rows of an array like the queries to `to_s` [warpgroups, ...]."""
        tokens, is_interpreted = self.spec.sizes.warpgroup_tokens, self.spec.is_interpreted
        first_token = work_tile["first_row"] + self.wg * tokens
        first_head = packed_heads(work_tile, self.spec)[0].head
        copy_token_rows(
            to_s.at[self.wg], rows_g, first_token, first_head, head=self.spec.shape.head,
            rows_per_head=tokens, num_warps=1 if is_interpreted else WARPS, is_interpreted=is_interpreted,
        )  # fmt: skip


def wait_for_copies(
    barrier: Barriers, num_pending: int, num_warpgroups: int, *, is_interpreted: bool
) -> None:
    """Wait until all warpgroups have arrived and at most `num_pending` groups of copies are incomplete.

    Args:
        barrier: Barrier at which the warpgroups meet in interpret mode, or None.
        num_pending: Number of groups of copies of each thread that need not be complete.
        num_warpgroups: Number of warpgroups of the thread block.
        is_interpreted: Whether the kernel runs in interpret mode.
    """
    wait_for_team(num_pending=num_pending, num_warpgroups=num_warpgroups, is_interpreted=is_interpreted)
    if barrier is not None:
        plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
