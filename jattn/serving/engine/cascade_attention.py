"""Cascade attention: decode steps that read the blocks shared by all of their requests only once."""

import inspect
from typing import Any

import jax
import numpy as np

from jattn.batch.bucket import Bucket
from jattn.cascade import MIN_REQS, use_cascade_attention, why_not_cascade
from jattn.parallel import num_mesh_devices, num_ranks
from jattn.runtime.decode_graphs import GraphStep
from jattn.serving.engine.config import ResolvedConfig
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.served_model import ServedModel, attention_layers
from jattn.serving.engine.step import step_graphs
from jattn.spec import AttentionSpec
from pallas_kernels.checks import unsupported


class CascadeAttention:
    """Chooses the steps that use cascade attention, and holds their executables (decode rows only).

    The length of the prefix is traced, so one executable per bucket serves all lengths.
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
        """Prepare the executables. Nothing is compiled yet.

        Args:
            step: Step function, a ModelStep.
            buckets: Buckets with decode rows of one token.
            spec: Attention of the model's layers, or of one of them.
            block_size: Number of tokens per block.
            num_sms: Number of multiprocessors of the GPU, for the cost estimate. None: use every shared
                prefix.
            tp: Number of devices that share the heads.
            cp: Number of devices that share the keys.
        """
        self.graphs = step_graphs(step, buckets)
        self._block_size = block_size
        self._max_rows = max(bucket.max_decodes for bucket in buckets)
        self._num_sms, self._cp = num_sms, cp
        self._heads = max(spec.num_q_heads // tp, 1), max(spec.num_kv_heads // tp, 1)

    def prefix_len(self, step: Step) -> int:
        """Return the number of prefix tokens that a step should read once; 0 for none."""
        rows = len(step.request_ids)
        if step.num_draft_tokens or step.num_prefills or not 1 < rows <= self._max_rows:
            return 0
        length = num_common_prefix_blocks(step.block_tables, min(step.seq_lens) - 1, self._block_size)
        length *= self._block_size
        is_worth_it = length > 0 and self._pays(length, rows)
        return length if is_worth_it and self._is_ready(rows, step.block_tables.shape[1]) else 0

    def _is_ready(self, num_decodes: int, num_blocks: int) -> bool:
        """Return whether the executable is compiled, or no compilation is running in the background."""
        bucket = self.graphs.choose(num_decodes=num_decodes, num_blocks=num_blocks)
        return bucket in self.graphs.executables or not self.graphs.is_compiling

    def _pays(self, length: int, rows: int) -> bool:
        if self._num_sms is None:
            return True
        lens, local_len = np.ones(rows, np.int32), length // self._cp
        return use_cascade_attention(local_len, lens, *self._heads, False, False, False, self._num_sms)


def num_common_prefix_blocks(block_tables: np.ndarray, num_tokens: int, block_size: int) -> int:
    """Return the number of leading blocks that all rows share and that `num_tokens` tokens fill.

    Source: vLLM V1 `KVCacheManager.get_num_common_prefix_blocks`, which counts blocks that all requests
    share.
    """
    max_prefix_blocks = num_tokens // block_size
    if max_prefix_blocks <= 0 or block_tables[0, 0] != block_tables[-1, 0]:
        return 0
    columns = block_tables[:, :max_prefix_blocks]
    is_common = (columns == columns[:1]).all(axis=0)
    return max_prefix_blocks if is_common.all() else int(np.argmin(is_common))


def make_cascade_attention(
    model: ServedModel, step: GraphStep, config: ResolvedConfig
) -> CascadeAttention | None:
    """Create an engine's CascadeAttention; None if no step uses it.

    Args:
        model: The served model.
        step: Step function, a ModelStep.
        config: Configuration of the engine. If cascade_attention is None, it is used for long prefixes.

    Raises:
        NotImplementedError: If it is enabled and a layer does not support it.
    """
    enabled = config.cascade_attention
    num_sms = None if enabled else getattr(jax.local_devices()[0], "core_count", None)
    if not enabled and num_sms is None:
        return None
    if (reason := _why_not(model)) is not None:
        if enabled:
            raise unsupported("cascade_attention=True", reason, "Pass cascade_attention=None")
        return None
    min_rows = 2 if enabled else MIN_REQS
    powers = (1 << i for i in range(1, 1 + config.max_num_seqs.bit_length()))
    rows = [n for n in powers if min_rows <= n < 2 * config.max_num_seqs]
    if not rows:
        return None
    widths = sorted({bucket.max_blocks for bucket in config.buckets if bucket.max_blocks})
    cp = num_ranks(model)
    return CascadeAttention(
        step,
        [Bucket(max_decodes=n, max_blocks=width) for width in widths for n in rows],
        attention_layers(model)[0].spec,
        block_size=config.block_size,
        num_sms=num_sms,
        tp=num_mesh_devices(model) // cp,
        cp=cp,
    )


def _why_not(model: Any) -> str | None:
    """Return the reason why a model does not support cascade attention; None if it does."""
    if "common_prefix_len" not in inspect.signature(model.plan).parameters:
        return "the model's plan takes no common_prefix_len"
    layers = attention_layers(model)
    if not layers:
        return "the model has no PagedAttention"
    for layer in layers:
        if (reason := why_not_cascade(layer.spec)) is not None:
            return f"{reason[0]}: {reason[1]}"
        if layer.alibi_slopes is not None:
            return "alibi_slopes: cascade attention needs masks that ignore distance"
    return None
