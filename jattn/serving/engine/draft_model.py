"""Drafts by a small model: its own caches, over the blocks that the requests have."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int32

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import BatchMetadata, build_batch_metadata
from jattn.batch.requests import pack_tokens
from jattn.batch.transitions import advance, recompute_slot_mapping
from jattn.pytree import replace
from jattn.runtime.decode_graphs import GraphStep
from jattn.serving.engine.block_copies import BlockCopies, free
from jattn.serving.engine.proposer import Proposer
from jattn.serving.engine.sampler import SamplingMetadata, build_sampling_metadata, sample
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import Generation
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.step import step_graphs, with_implementation
from jattn.serving.engine.warmup import Runs
from jattn.serving.engine.weights import Weights

# Tokens that it begins a round with: after a round whose drafts all stay the last of them was never read, and
# the model's own token behind it neither. Reading one of them twice writes the same again.
FIRST_TOKENS = 2


class DraftCall(NamedTuple):
    """What a draft model does before a step.

    Attributes:
        readings: Steps that read tokens of requests first: their metadata and tokens.
        metadata: Of the step that drafts.
        token_ids: Of the step that drafts, FIRST_TOKENS a row.
        drawn_by: Sampling parameters, and how many tokens each row was given before.
    """

    readings: Sequence[tuple[BatchMetadata, Any]]
    metadata: BatchMetadata
    token_ids: Any
    drawn_by: tuple[SamplingMetadata, Any]


class DraftModel(Proposer):
    """Drafts k tokens of each row in one call: a step of two tokens a row, then k - 1 steps of one.

    It draws with the noise that the model will verify with, without filters and penalties. A request's
    tokens are read when it is first drafted for, and what came while it slept when it wakes.
    """

    def __init__(
        self,
        model: ServedModel,
        num_tokens: int,
        buckets: Sequence[Bucket],
        prompt_buckets: Sequence[Bucket],
        *,
        num_blocks: int,
        block_size: int,
        implementation: str | Sequence[str] | None,
    ) -> None:
        """Makes the caches, in the model's dtype; compiles nothing yet.

        Args:
            model: Who drafts.
            num_tokens: Drafts of a row.
            buckets: Of the steps that verify.
            prompt_buckets: Of steps that read prompts, the largest last.
            num_blocks: Blocks of each layer's cache, as many as the engine's have.
            block_size: Tokens of a block.
            implementation: Of the attention, as in `attend`.
        """
        self._weights, self._block_size = Weights(model), block_size
        graphdef = nnx.graphdef(with_implementation(model, implementation))
        cache: dict[str, Any] = {"dtype": None, "quantization": None, "skip_layers": ()}
        self._new_caches = functools.partial(model.create_caches, num_blocks, block_size=block_size, **cache)
        self._caches: Any = self._new_caches()
        self._copies = BlockCopies(max(bucket.max_decodes for bucket in buckets))
        self._largest = prompt_buckets[-1]
        self._readers = step_graphs(make_reading_step(graphdef), prompt_buckets)
        rows = [dataclasses.replace(bucket, decode_query_len=FIRST_TOKENS) for bucket in buckets]
        self._drafters = step_graphs(make_draft_step(graphdef, num_tokens), rows)
        self.runs = (
            Runs(self._readers, block_size, lambda bucket: [_zeros(bucket.max_tokens)]),
            Runs(self._drafters, block_size, _drafting_inputs),
        )

    @property
    def num_compiles(self) -> int:
        """As `Proposer.num_compiles`."""
        return self._readers.num_compiles + self._drafters.num_compiles

    def look(self, generation: Generation, num_tokens: int) -> int:
        """As `Proposer.look`: always as many as are wanted."""
        return num_tokens

    def prepare(
        self,
        step: Step,
        generations: Sequence[Generation],
        bucket: Bucket,
        sampling: SamplingMetadata,
        num_generated: Any,
    ) -> DraftCall:
        """As `Proposer.prepare`."""
        readings = self._missing(step, generations)
        lens = [len(one.token_ids) for one in generations]
        bucket = dataclasses.replace(bucket, decode_query_len=FIRST_TOKENS)
        metadata = self._metadata([FIRST_TOKENS] * len(lens), lens, step.block_tables, bucket)
        ids: Any = pack_tokens([one.token_ids[-FIRST_TOKENS:] for one in generations], bucket)
        drawn_by = (
            replace(sampling, draws=True, floors=False, cuts=False),
            np.asarray(num_generated, np.int32),
        )
        for one in generations:
            if one.drafting.num_drafted:
                one.drafting.num_read = len(one.token_ids)
        return DraftCall(readings, metadata, ids, drawn_by)

    def start(self, prepared: DraftCall) -> Int32[Array, " tokens"]:
        """As `Proposer.start`."""
        weights = self._weights.state
        for metadata, ids in prepared.readings:
            self.runs[0].num_runs[metadata.bucket] += 1
            _, self._caches = self._readers(weights, self._caches, metadata, ids)
        _, metadata, ids, drawn_by = prepared
        self.runs[1].num_runs[metadata.bucket] += 1
        token_ids: Array
        token_ids, self._caches = self._drafters(weights, self._caches, metadata, ids, *drawn_by)
        return token_ids

    def copy_blocks(self, pairs: Any) -> None:
        """As `Proposer.copy_blocks`."""
        self._caches = self._copies(self._caches, pairs)

    def reset(self) -> None:
        """As `Proposer.reset`."""
        free(self._caches)  # before there is memory for others
        self._caches = self._new_caches()

    def warm_up(self, place: int, bucket: Bucket) -> None:
        """As `Proposer.warm_up`."""
        self._caches = self.runs[place].run(bucket, self._weights.state, self._caches)

    def precompile(self, *, progress: bool, wait: bool) -> None:
        """As `Proposer.precompile`."""
        how: dict[str, Any] = {"block_size": self._block_size, "progress": progress, "wait": wait}
        weights = self._weights.refresh()
        for runs in self.runs:
            runs.graphs.precompile(weights, self._caches, inputs=runs.inputs, **how)
        for compile in self._copies.compilers(self._caches):
            compile()

    # --------------------------------------------------------------------------------------- inside
    def _missing(self, step: Step, generations: Sequence[Generation]) -> list[tuple[BatchMetadata, Any]]:
        """Steps that read what is missing of the requests that are drafted for, but for their last tokens."""
        readings: list[tuple[BatchMetadata, Any]] = []
        while True:
            parts: list[tuple[int, Generation, int, int]] = []
            budget = self._largest.max_prefill_tokens
            for row, one in enumerate(generations):
                first, end = one.drafting.num_read, len(one.token_ids) - FIRST_TOKENS
                count = min(end - first, budget)
                if one.drafting.num_drafted and count > 0 and len(parts) < self._largest.max_prefills:
                    parts.append((row, one, first, count))
                    budget -= count
            if not parts:
                return readings
            ids = [one.token_ids[first : first + count] for _, one, first, count in parts]
            lens = [count for *_, count in parts]
            ends = [first + count for *_, first, count in parts]
            tables = step.block_tables[[row for row, *_ in parts]]
            bucket = self._readers.choose(lens, num_blocks=tables.shape[1])
            metadata = self._metadata(lens, ends, tables, bucket)
            readings.append((metadata, pack_tokens(ids, bucket)))
            for (_, one, *_), end in zip(parts, ends, strict=True):
                one.drafting.num_read = end

    def _metadata(self, query_lens: Any, seq_lens: Any, tables: Any, bucket: Bucket) -> BatchMetadata:
        sizes: dict[str, Any] = {"block_size": self._block_size, "bucket": bucket, "to_device": False}
        return build_batch_metadata(query_lens, seq_lens, tables, **sizes)


def _zeros(count: int) -> Any:
    return np.zeros(count, np.int32)


def _drafting_inputs(bucket: Bucket) -> list[Any]:
    """Of a step that drafts for no request."""
    drawn = SamplingParams(temperature=1.0, seed=0)
    sampling = build_sampling_metadata([drawn], num_rows=bucket.max_reqs)
    return [_zeros(bucket.max_tokens), sampling, _zeros(bucket.max_reqs)]


def make_reading_step(graphdef: Any) -> GraphStep:
    """A step that writes the keys and values of its tokens, and asks for nothing else."""

    def step(params: Any, caches: Any, metadata: Any, token_ids: Any) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params)
        _, caches = model(token_ids, caches, metadata, plan=model.plan(metadata, caches))
        return (), caches

    return step


def make_draft_step(graphdef: Any, num_tokens: int) -> GraphStep:
    """A step of FIRST_TOKENS tokens a row to the tokens of the step that verifies: `[reqs * (1 + k)]`."""

    def step(
        params: Any, caches: Any, metadata: Any, token_ids: Any, sampling: Any, num_generated: Any
    ) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params)

        def drawn(ids: Array, metadata: BatchMetadata, caches: Any, index: Any) -> tuple[Array, Any]:
            hidden, caches = model(ids, caches, metadata, plan=model.plan(metadata, caches))
            logits = model.logits(hidden[metadata.last_token_indices])
            return sample(logits, sampling, num_generated + index), caches

        def one_more(index: Array, state: Any) -> tuple[Any, Any, Any]:
            drafts, metadata, caches = state
            new, caches = drawn(drafts[:, index - 1], metadata, caches, index)
            return drafts.at[:, index].set(new), advance(metadata), caches

        first, caches = drawn(token_ids, metadata, caches, 0)
        drafts = jnp.zeros((first.shape[0], num_tokens), jnp.int32).at[:, 0].set(first)
        state = drafts, _behind(metadata), caches
        drafts, _, caches = jax.lax.fori_loop(jnp.int32(1), jnp.int32(num_tokens), one_more, state)
        last = token_ids.reshape(-1, FIRST_TOKENS)[:, -1:]
        return jnp.concatenate([last, drafts], axis=1).reshape(-1), caches

    return step


def _behind(metadata: BatchMetadata) -> BatchMetadata:
    """The step of one token a row behind one of several."""
    rows = jnp.arange(metadata.bucket.max_decodes + 1, dtype=jnp.int32)
    stepped = replace(
        metadata,
        seq_lens=jnp.where(metadata.seq_lens > 0, metadata.seq_lens + 1, 0),
        query_start_loc=jnp.minimum(rows, metadata.num_decodes),
        slot_mapping=_no_slots(metadata),
        bucket=dataclasses.replace(metadata.bucket, decode_query_len=1),
    )
    return replace(stepped, slot_mapping=recompute_slot_mapping(stepped))


def _no_slots(metadata: BatchMetadata) -> Int32[Array, " reqs"]:
    return jnp.zeros(metadata.bucket.max_decodes, jnp.int32)
