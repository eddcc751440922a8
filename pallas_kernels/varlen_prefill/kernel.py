"""The prefill kernel: O = softmax(Q K^T) V of packed queries, 64 rows a warpgroup.

A thread block stays on its SM and works through its share of the items (a tile of queries of a head, or of a
few that share it, before all of its keys or a split), the longest first. A warpgroup loads, a warp for each
team; the two or three before it compute, as one team on the rows of one item, or each as a team of its own.
Both sides go through the same items (n; b = n % query_buffers) and tiles of keys (i, over all items of the
team; s = i % stages), and meet at barriers only:

    loading: warp t                      shared memory      computing: each warpgroup of team t
    ---------------                      -------------      -----------------------------------
    for each item n:                                        for each item n:
      its row of the schedule                                 wait q_full[b]
      for each tile i:                                        for each tile i:
        block ids, or the tile of a list                        wait k_full[s]
        wait k_free[s]                                          issue S(i) = Q K(i)^T
        TMA: keys ---------------------> K [stages] ----------> issue O += P(i-1) V(i-1)
        if it is the item's first:                              await S(i)
          wait q_free[b]                                        arrive k_free[s]
          TMA: queries, the row -------> Q [buffers]            softmax: P(i), beside P(i-1) V(i-1)
        wait v_free[s]                                          wait v_full[s], clear what nobody sees
        TMA: values -------------------> V [stages] ----------> await O
                                                                arrive v_free[s'], s' of tile i - 1
                                                                O *= shrink, where a top has changed
                                                              O += P V of the last tile, arrive v_free[s]
                                         Q [b] <------------- O / total, in place of the queries
                                           TMA: --> out       lse --> global memory
                                                              arrive q_free[b] when it has left: beside S
                                                              of item n + 1, or at once with one buffer

A barrier `full` completes when all TMA copies into it have landed. k_free and v_free do when all warpgroups
of the team have arrived; Q, q_full and q_free are each warpgroup's own. Of an item's first tile there is only
S; tiles that are not for a warpgroup's rows it lets pass (Ring.skip). What a split brings goes from registers
to global memory as it is; merge.py adds up the splits of a tile. Making the warpgroups issue in turn measured
1 to 5 % slower on an H200, so they do not.

Keys of 8 bits come into stages of their own, and two warpgroups, one for keys and one for values, stand
between both sides (widening.py): they wait for what has come and for a stage of K or V that is free, fill it
with the same in 16 bits, and arrive where TMA does otherwise.

The rooms: loader (left), pipeline (middle), attention (right), which calls products, bias, masking, softmax
with its tops, values and store; items and query_rows say what is whose, schedule and splits what there is.
"""

import functools

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Scalar
from pallas_kernels.varlen_prefill.attention import Attention
from pallas_kernels.varlen_prefill.items import Worklist
from pallas_kernels.varlen_prefill.loader import Loader
from pallas_kernels.varlen_prefill.memory import (
    WIDEN_REGISTERS,
    output_types,
    pipeline_types,
    registers,
    smem_types,
)
from pallas_kernels.varlen_prefill.pipeline import Queries
from pallas_kernels.varlen_prefill.refs import Inputs, Outputs, Pipeline, Smem
from pallas_kernels.varlen_prefill.spec import PrefillSpec
from pallas_kernels.varlen_prefill.widening import Widener


def prefill(inputs: Inputs, spec: PrefillSpec) -> Outputs:
    """Output, and the log-sum-exp of every token and head."""
    kernel = plgpu.kernel(
        functools.partial(prefill_body, spec=spec),
        out_type=(output_types(inputs, spec),),
        scratch_types=(smem_types(spec), pipeline_types(spec)),
        grid=(spec.sizes.ctas,),
        grid_names=("cta",),
        num_threads=spec.num_warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="varlen_prefill",
        interpret=spec.interpret,
    )
    (outputs,) = kernel(inputs)
    return outputs


def prefill_body(
    inputs: Inputs, outputs: Outputs, smem: Smem, pipeline: Pipeline, *, spec: PrefillSpec
) -> None:
    """What a thread block does: the first warpgroups compute, one loads, a warp a team, two widen."""
    wg, loads = lax.axis_index("warpgroup"), spec.sizes.warpgroups
    work = Worklist(inputs.schedule, spec)
    load_registers, compute_registers = registers(spec)

    @pl.when(wg == loads)
    def _() -> None:
        plgpu.set_max_registers(load_registers, action="decrease")

        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            for team in range(spec.sizes.teams):
                loader = Loader(inputs, smem, pipeline, spec, team)
                pl.when(warp == team)(functools.partial(loader.load_share, work))

    def widen(nth: int) -> None:
        plgpu.set_max_registers(WIDEN_REGISTERS, action="decrease")
        Widener(inputs, smem, pipeline, spec, nth).widen_share(work)

    if spec.narrow is not None:
        for nth in range(2):
            pl.when(wg == loads + 1 + nth)(functools.partial(widen, nth))

    @pl.when(wg < loads)
    def _() -> None:
        plgpu.set_max_registers(compute_registers, action="increase")
        queries = Queries(smem, pipeline, spec.sizes, wg)
        Attention(inputs, outputs, smem, pipeline, spec=spec, queries=queries).attend_share(work)
