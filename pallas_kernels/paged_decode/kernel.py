"""The decode kernel: S^T = K Q^T, softmax along the keys, O^T = V^T P^T, over one span of the work.

Keys are the tensor core's M and queries its N (swap-AB), so that a group of 4 query heads costs 8 columns,
not 64 rows. A thread block has a span of the schedule and a tile of query rows; both of its sides walk over
the same requests (n) and tiles of keys (i, over all requests; s = i % stages) and meet at barriers only:

    producer: warp 0 of warpgroup 1      shared memory    consumer: warpgroup 0
    -------------------------------      -------------    ----------------------------------------------
    for each request n of the span:                       for each request n of the span:
      block ids of its first tile
      wait q_free[n % 2]                                    wait q_full[n % 2]
      TMA: queries --------------------> Q [2] -----------> (MmaProducts: into registers)
      for each tile i:                                      for each tile i:
        wait k_free[s]                                        wait k_full[s]
        TMA: keys, scales a token -----> K [stages] --------> S^T = K Q^T
                                                              arrive k_free[s]
        wait v_free[s]                                        mask, softmax: P^T in 16 bits
        TMA: values, scales a token ---> V [stages] --+       wait v_full[s]
        (block ids of tile i + 1 are                  +-----> O^T = O^T * shrink + V^T P^T
         read before these waits)                             arrive v_free[s]
                                                            whole in this span: out, lse    --> global memory
                                                            else O^T, max, sum: a partial   --> global memory
                                                            arrive q_free[n % 2]
    paged_decode_merge, the next kernel (merge.py): adds up the partials of each request that was cut

A barrier `full` completes when all TMA copies into it have landed, one `free` by the consumer's arrival.
WgmmaProducts: the warpgroup multiplies together and P^T passes through shared memory; 8-bit values are
widened there before the mask, where v_full is awaited then, and v_free arrived at before the softmax.
MmaProducts: each warp has 16 of a tile's 64 keys and a softmax of its own, P^T stays in registers, and the
four results meet in shared memory behind a request's last tile. Values with a scale a token: v_full is
awaited before the softmax, which the scales join.
"""

import functools

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.attention import Attention
from pallas_kernels.paged_decode.loader import Loader
from pallas_kernels.paged_decode.memory import output_types, pipeline_types, smem_types
from pallas_kernels.paged_decode.refs import Inputs, Outputs, Pipeline, Smem
from pallas_kernels.paged_decode.segments import Span
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.shared.types import Scalar

CONSUMER, PRODUCER = range(2)  # warpgroups


def decode_partials(inputs: Inputs, spec: DecodeSpec) -> Outputs:
    """Attention of the requests that lie in one span, and partial results of the others."""
    kernel = plgpu.kernel(
        functools.partial(decode_body, spec=spec),
        out_type=(output_types(inputs, spec),),
        scratch_types=(smem_types(inputs.cache, spec), pipeline_types(inputs.cache, spec)),
        grid=(spec.num_spans, spec.shape.head_tiles),
        grid_names=("span", "head_tile"),
        num_threads=2,
        thread_name="warpgroup",
        # Warps share nothing but Smem.merge, whose barriers stand in ptx/warp_results.py.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=spec.sizes.by_warp),
        kernel_name="paged_decode",
        interpret=spec.interpret,
    )
    (outputs,) = kernel(inputs)
    return outputs


def decode_body(
    inputs: Inputs, outputs: Outputs, smem: Smem, pipeline: Pipeline, *, spec: DecodeSpec
) -> None:
    """What a thread block does; refs of `inputs` and `outputs` are in global memory."""
    number, head_tile = lax.axis_index("span"), lax.axis_index("head_tile")
    cache = inputs.cache
    span = Span(number, head_tile, cache.seq_lens, inputs.unit_ends, inputs.lists.counts, spec)

    def produce() -> None:
        Loader(inputs, smem, pipeline, span).load_span()

    def consume() -> None:
        Attention(inputs, outputs, smem, pipeline, span).attend_span()

    @pl.when(lax.axis_index("warpgroup") == PRODUCER)
    def _() -> None:
        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            pl.when(warp == 0)(produce)

    pl.when(lax.axis_index("warpgroup") == CONSUMER)(consume)
