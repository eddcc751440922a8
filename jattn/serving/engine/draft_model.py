"""Drafting by a small model with its own KV caches, which use the same block ids as the engine's."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int32

from jattn.batch.bucket import Bucket, pack_tokens
from jattn.batch.metadata import BatchMetadata, build_batch_metadata
from jattn.batch.transitions import advance, recompute_slot_mapping
from jattn.pytree import replace
from jattn.runtime.decode_graphs import GraphStep
from jattn.serving.engine.block_copies import BlockCopier, free_caches
from jattn.serving.engine.config import ResolvedConfig
from jattn.serving.engine.proposer import Proposer
from jattn.serving.engine.sampler import SamplingMetadata, build_sampling_metadata, sample
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import SequenceState
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.step import (
    WarmupRuns,
    draft_buckets,
    draft_prefill_buckets,
    step_graphs,
    with_implementation,
)
from jattn.serving.engine.weights import Weights

# Number of tokens that start a round. If all drafts of the previous round were accepted, neither its last
# draft nor the model's next token has been processed. Processing a token twice writes the same values again.
FIRST_TOKENS = 2


class DraftCall(NamedTuple):
    """Inputs of a draft model for one step.

    Attributes:
        prefills: Metadata and tokens of the prefill steps for tokens that the draft model's KV cache lacks.
        metadata: Metadata of the drafting step.
        token_ids: First tokens of the drafting step, FIRST_TOKENS per row.
        sampling_inputs: Sampling parameters, and the number of generated tokens of each row.
    """

    prefills: Sequence[tuple[BatchMetadata, Any]]
    metadata: BatchMetadata
    token_ids: Any
    sampling_inputs: tuple[SamplingMetadata, Any]


class DraftModel(Proposer):
    """Drafts k tokens per row in one call: a step with two tokens per row, then k - 1 steps with one.

    It samples with the noise that verification uses, without filters and penalties. A request's tokens are
    processed when it is first drafted for, and tokens from a pause when drafting resumes.
    """

    def __init__(self, model: ServedModel, config: ResolvedConfig) -> None:
        """Create the KV caches in the model's dtype, with as many blocks as the engine's. Compile nothing.

        Args:
            model: The draft model.
            config: Configuration of the engine.
        """
        self._weights, self._block_size = Weights(model), config.block_size
        graphdef = nnx.graphdef(with_implementation(model, config.implementation))
        self._new_caches = functools.partial(
            model.create_caches,
            config.num_blocks,
            block_size=config.block_size,
            dtype=None,
            quantization=None,
            skip_layers=(),
        )
        self._caches: Any = self._new_caches()
        self._copies = BlockCopier(config.max_num_seqs)
        sizes = config.max_num_seqs, config.max_num_batched_tokens, config.max_blocks
        prompt_buckets = draft_prefill_buckets(*sizes)
        self._largest = prompt_buckets[-1]
        self._prefill_graphs = step_graphs(make_prefill_step(graphdef), prompt_buckets)
        num_tokens = config.num_speculative_tokens
        rows = [
            dataclasses.replace(bucket, decode_query_len=FIRST_TOKENS)
            for bucket in draft_buckets(config.max_num_seqs, num_tokens, config.max_blocks)
        ]
        self._draft_graphs = step_graphs(make_draft_step(graphdef, num_tokens), rows)
        self.runs = (
            WarmupRuns(self._prefill_graphs, config.block_size, lambda bucket: [_zeros(bucket.max_tokens)]),
            WarmupRuns(self._draft_graphs, config.block_size, _drafting_inputs),
        )

    @property
    def num_compiles(self) -> int:
        """Number of compiled executables."""
        return self._prefill_graphs.num_compiles + self._draft_graphs.num_compiles

    def find_drafts(self, sequence: SequenceState, num_tokens: int) -> int:
        """Return `num_tokens`: a model can always draft."""
        return num_tokens

    def prepare(
        self,
        step: Step,
        sequences: Sequence[SequenceState],
        bucket: Bucket,
        sampling: SamplingMetadata,
        num_generated: Any,
    ) -> DraftCall:
        """Return the draft model's work for a step; see `Proposer.prepare`."""
        prefills = self._catch_up_steps(step, sequences)
        lens = [len(sequence.token_ids) for sequence in sequences]
        bucket = dataclasses.replace(bucket, decode_query_len=FIRST_TOKENS)
        metadata = self._metadata([FIRST_TOKENS] * len(lens), lens, step.block_tables, bucket)
        ids: Any = pack_tokens([sequence.token_ids[-FIRST_TOKENS:] for sequence in sequences], bucket)
        sampling_inputs = (
            replace(sampling, has_sampling=True, has_filters=False, has_top_k_or_top_p=False),
            np.asarray(num_generated, np.int32),
        )
        for sequence in sequences:
            if sequence.draft_state.num_drafted:
                sequence.draft_state.num_read = len(sequence.token_ids)
        return DraftCall(prefills, metadata, ids, sampling_inputs)

    def start(self, prepared: DraftCall) -> Int32[Array, " tokens"]:
        """Start drafting, and return the step's tokens; see `Proposer.start`."""
        weights = self._weights.state
        for metadata, ids in prepared.prefills:
            self.runs[0].num_runs[metadata.bucket] += 1
            _, self._caches = self._prefill_graphs(weights, self._caches, metadata, ids)
        _, metadata, ids, sampling_inputs = prepared
        self.runs[1].num_runs[metadata.bucket] += 1
        token_ids: Array
        token_ids, self._caches = self._draft_graphs(weights, self._caches, metadata, ids, *sampling_inputs)
        return token_ids

    def copy_blocks(self, pairs: Any) -> None:
        """Copy blocks in the draft model's caches."""
        self._caches = self._copies(self._caches, pairs)

    def reset(self) -> None:
        """Create new KV caches."""
        free_caches(self._caches)  # There is no memory for both.
        self._caches = self._new_caches()

    def warm_up(self, graph_index: int, bucket: Bucket) -> None:
        """Run an executable of `runs[graph_index]` on an empty batch, and wait for it."""
        self._caches = self.runs[graph_index].run(bucket, self._weights.state, self._caches)

    def precompile(self, *, progress: bool, wait: bool) -> None:
        """Compile all executables; see `DecodeGraphs.precompile`."""
        weights = self._weights.refresh()
        for runs in self.runs:
            runs.graphs.precompile(
                weights,
                self._caches,
                block_size=self._block_size,
                inputs=runs.inputs,
                progress=progress,
                wait=wait,
            )
        for compile_copy in self._copies.compilers(self._caches):
            compile_copy()

    # --------------------------------------------------------------------------------------- inside
    def _catch_up_steps(
        self, step: Step, sequences: Sequence[SequenceState]
    ) -> list[tuple[BatchMetadata, Any]]:
        """Return the prefill steps that process the missing tokens of the sequences, except the last ones."""
        prefills: list[tuple[BatchMetadata, Any]] = []
        while True:
            chunks: list[tuple[int, SequenceState, int, int]] = []
            budget = self._largest.max_prefill_tokens
            for row, sequence in enumerate(sequences):
                first, end = sequence.draft_state.num_read, len(sequence.token_ids) - FIRST_TOKENS
                count = min(end - first, budget)
                if (
                    sequence.draft_state.num_drafted
                    and count > 0
                    and len(chunks) < self._largest.max_prefills
                ):
                    chunks.append((row, sequence, first, count))
                    budget -= count
            if not chunks:
                return prefills
            ids = [sequence.token_ids[first : first + count] for _, sequence, first, count in chunks]
            lens = [count for *_, count in chunks]
            ends = [first + count for *_, first, count in chunks]
            tables = step.block_tables[[row for row, *_ in chunks]]
            bucket = self._prefill_graphs.choose(lens, num_blocks=tables.shape[1])
            metadata = self._metadata(lens, ends, tables, bucket)
            prefills.append((metadata, pack_tokens(ids, bucket)))
            for (_, sequence, *_), end in zip(chunks, ends, strict=True):
                sequence.draft_state.num_read = end

    def _metadata(self, query_lens: Any, seq_lens: Any, tables: Any, bucket: Bucket) -> BatchMetadata:
        return build_batch_metadata(
            query_lens, seq_lens, tables, block_size=self._block_size, bucket=bucket, to_device=False
        )


def _zeros(count: int) -> Any:
    return np.zeros(count, np.int32)


def _drafting_inputs(bucket: Bucket) -> list[Any]:
    """Return the inputs of a drafting step without requests."""
    draft_tokens = SamplingParams(temperature=1.0, seed=0)
    sampling = build_sampling_metadata([draft_tokens], num_rows=bucket.max_reqs)
    return [_zeros(bucket.max_tokens), sampling, _zeros(bucket.max_reqs)]


def make_prefill_step(graphdef: Any) -> GraphStep:
    """Return a step that only writes the keys and values of its tokens."""

    def step(params: Any, caches: Any, metadata: Any, token_ids: Any) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params)
        _, caches = model(token_ids, caches, metadata, plan=model.plan(metadata, caches))
        return (), caches

    return step


def make_draft_step(graphdef: Any, num_tokens: int) -> GraphStep:
    """Return a step from FIRST_TOKENS tokens per row to the verifying step's tokens, `[reqs * (1 + k)]`."""

    def step(
        params: Any, caches: Any, metadata: Any, token_ids: Any, sampling: Any, num_generated: Any
    ) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params)

        def draft_tokens(ids: Array, metadata: BatchMetadata, caches: Any, index: Any) -> tuple[Array, Any]:
            hidden, caches = model(ids, caches, metadata, plan=model.plan(metadata, caches))
            logits = model.logits(hidden[metadata.last_token_indices])
            return sample(logits, sampling, num_generated + index), caches

        def draft_next(index: Array, state: Any) -> tuple[Any, Any, Any]:
            drafts, metadata, caches = state
            next_tokens, caches = draft_tokens(drafts[:, index - 1], metadata, caches, index)
            return drafts.at[:, index].set(next_tokens), advance(metadata), caches

        first, caches = draft_tokens(token_ids, metadata, caches, 0)
        drafts = jnp.zeros((first.shape[0], num_tokens), jnp.int32).at[:, 0].set(first)
        state = drafts, _next_step_metadata(metadata), caches
        drafts, _, caches = jax.lax.fori_loop(jnp.int32(1), jnp.int32(num_tokens), draft_next, state)
        last = token_ids.reshape(-1, FIRST_TOKENS)[:, -1:]
        return jnp.concatenate([last, drafts], axis=1).reshape(-1), caches

    return step


def _next_step_metadata(metadata: BatchMetadata) -> BatchMetadata:
    """Return the metadata of the next step, with one token per row."""
    rows = jnp.arange(metadata.bucket.max_decodes + 1, dtype=jnp.int32)
    stepped = replace(
        metadata,
        seq_lens=jnp.where(metadata.seq_lens > 0, metadata.seq_lens + 1, 0),
        query_start_loc=jnp.minimum(rows, metadata.num_decodes),
        slot_mapping=jnp.zeros(metadata.bucket.max_decodes, jnp.int32),
        bucket=dataclasses.replace(metadata.bucket, decode_query_len=1),
    )
    return replace(stepped, slot_mapping=recompute_slot_mapping(stepped))
