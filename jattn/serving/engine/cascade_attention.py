"""Decode steps whose requests all begin with the same blocks: these are attended to once."""

import inspect
from typing import Any

import jax
import numpy as np
from flax import nnx

from jattn.batch.bucket import Bucket
from jattn.cascade import MIN_REQS, use_cascade_attention, why_no_cascade
from jattn.nn import PagedAttention
from jattn.parallel import num_mesh_devices, num_ranks
from jattn.runtime.decode_graphs import GraphStep
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.step import step_graphs
from jattn.spec import AttentionSpec
from pallas_kernels.checks import unsupported


class CascadeSteps:
    """Tells which steps have a prefix that is worth it, and has their executables: of decode rows alone.

    The length of the prefix is traced, so one executable a bucket serves all.
    """

    def __init__(
        self,
        step: GraphStep,
        buckets: list[Bucket],
        spec: AttentionSpec,
        *,
        block_size: int,
        num_sms: int | None,
        tp: int = 1,
        cp: int = 1,
    ) -> None:
        """Compiles nothing yet.

        Args:
            step: As of make_step; it is given the prefix's length behind its tokens.
            buckets: Of decode rows of one token.
            spec: Of the model's layers, or of one of them.
            block_size: Tokens of a block.
            num_sms: Multiprocessors of the GPU, by which it is told what pays; None = any prefix does.
            tp: Devices that the layers' heads are spread over.
            cp: Devices that keys are spread over.
        """
        self.graphs = step_graphs(step, buckets)
        self._block_size = block_size
        self._most_rows = max(bucket.max_decodes for bucket in buckets)
        self._num_sms, self._cp = num_sms, cp
        self._heads = max(spec.num_q_heads // tp, 1), max(spec.num_kv_heads // tp, 1)

    def prefix_len(self, step: Step) -> int:
        """Tokens of the prefix that a step should attend to once; 0 = none."""
        rows = len(step.request_ids)
        if step.num_draft_tokens or step.num_prefills or not 1 < rows <= self._most_rows:
            return 0
        length = num_common_prefix_blocks(step.block_tables, min(step.seq_lens) - 1, self._block_size)
        length *= self._block_size
        is_worth_it = length > 0 and self._pays(length, rows)
        return length if is_worth_it and self._is_ready(rows, step.block_tables.shape[1]) else 0

    def _is_ready(self, num_decodes: int, num_blocks: int) -> bool:
        """False while the executable is one of those that are compiled behind what runs."""
        bucket = self.graphs.choose(num_decodes=num_decodes, num_blocks=num_blocks)
        return bucket in self.graphs.executables or not self.graphs.is_compiling

    def _pays(self, length: int, rows: int) -> bool:
        if self._num_sms is None:
            return True
        lens, of_device = np.ones(rows, np.int32), length // self._cp
        return use_cascade_attention(of_device, lens, *self._heads, False, False, False, self._num_sms)


def num_common_prefix_blocks(block_tables: np.ndarray, num_tokens: int, block_size: int) -> int:
    """Leading columns in which all rows have the same block, of those that `num_tokens` tokens fill.

    Source: vLLM V1 `KVCacheManager.get_num_common_prefix_blocks`, which counts blocks that all share.
    """
    most = num_tokens // block_size
    if most <= 0 or block_tables[0, 0] != block_tables[-1, 0]:
        return 0
    columns = block_tables[:, :most]
    is_common = (columns == columns[:1]).all(axis=0)
    return most if is_common.all() else int(np.argmin(is_common))


def cascade_steps_of(
    model: ServedModel,
    step: GraphStep,
    buckets: tuple[Bucket, ...],
    *,
    max_num_seqs: int,
    block_size: int,
    wanted: bool | None,
) -> CascadeSteps | None:
    """What an engine asks before each step; None where no step is to have a cascade.

    Args:
        model: Whose steps.
        step: As of make_step.
        buckets: Of its other steps.
        max_num_seqs: Most requests of a step.
        block_size: Tokens of a block.
        wanted: Whether prefixes are attended to once; None = where they are long and the GPU gains.

    Raises:
        NotImplementedError: It is wanted, and a layer cannot.
    """
    num_sms = None if wanted else getattr(jax.local_devices()[0], "core_count", None)
    if wanted is False or (wanted is None and (jax.default_backend() != "gpu" or num_sms is None)):
        return None
    if (found := _why_not(model)) is not None:
        if wanted:
            raise unsupported("cascade_attention=True", found, "Leave cascade_attention=None")
        return None
    least = 2 if wanted else MIN_REQS
    powers = (1 << i for i in range(1, 1 + max_num_seqs.bit_length()))
    rows = [n for n in powers if least <= n < 2 * max_num_seqs]
    widths = sorted({bucket.max_blocks for bucket in buckets if bucket.max_blocks})
    if not rows:
        return None
    spec, *_ = _specs(model)
    sizes = [Bucket(max_decodes=n, max_blocks=width) for width in widths for n in rows]
    cp = num_ranks(model)
    devices = {"tp": num_mesh_devices(model) // cp, "cp": cp}
    return CascadeSteps(step, sizes, spec, block_size=block_size, num_sms=num_sms, **devices)


def _specs(model: Any) -> list[AttentionSpec]:
    return [one.spec for _, one in nnx.iter_modules(model) if isinstance(one, PagedAttention)]


def _why_not(model: Any) -> str | None:
    """Why a model's steps cannot attend to a prefix once; None = they can."""
    if "common_prefix_len" not in inspect.signature(model.plan).parameters:
        return "the model's plan takes no common_prefix_len"
    layers = [one for _, one in nnx.iter_modules(model) if isinstance(one, PagedAttention)]
    if not layers:
        return "the model has no PagedAttention"
    for layer in layers:
        if (found := why_no_cascade(layer.spec)) is not None:
            return f"{found[0]}: {found[1]}"
        if layer.alibi_slopes is not None:
            return "alibi_slopes: cascade attention needs masks that ignore distance"
    return None
