"""What the engine has on the device: weights, caches, executables, and steps that run while the host goes on.

A step's tokens stay on the device and feed the next one, which is started before they are read: the host
prepares a step while the device runs the last.
"""

import collections
import concurrent.futures
import contextlib
import functools
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.batch.bucket import Bucket
from jattn.batch.check import check_batch
from jattn.batch.metadata import build_batch_metadata
from jattn.parallel import replicated_sharding
from jattn.serving.engine.batch_invariance import InvariantBuckets, make_invariant
from jattn.serving.engine.block_copies import BlockCopies, free
from jattn.serving.engine.cascade_attention import cascade_steps_of
from jattn.serving.engine.config import StepLimits
from jattn.serving.engine.doctor import explain
from jattn.serving.engine.kv_cache_groups import near_layers_of
from jattn.serving.engine.logprobs import prompt_logprobs
from jattn.serving.engine.processes import ProcessError, Processes
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import Generation
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.speculative import Speculation
from jattn.serving.engine.step import StepTokens, make_step, near_tables, with_implementation
from jattn.serving.engine.step_io import (
    ImplementationArg,
    InFlight,
    NewTokens,
    PromptCall,
    StepCall,
    most_wanted,
    new_tokens,
    prompt_parts,
    step_adjustments,
    step_tokens,
    wait_for,
)
from jattn.serving.engine.step_sampler import Sampled, Samplers, StepSampling
from jattn.serving.engine.warmup import Cold, EmptySteps, Runs
from jattn.serving.engine.weights import Weights, host_tree

MOST_IN_FLIGHT = 2  # steps


class Runner:
    """Runs steps: `start` one, `read` the oldest that is not read. At most two are in flight."""

    def __init__(
        self,
        model: ServedModel,
        limits: StepLimits,
        *,
        num_blocks: int,
        buckets: Sequence[Bucket] | None,
        implementation: str | Sequence[str] | None,
        checks_batches: bool,
        cache: dict[str, Any],
        speculation: Speculation | None = None,
        cascade_attention: bool | None = None,
        processes: Processes | None = None,
    ) -> None:
        """Makes the caches; compiles nothing yet. Arguments as `Engine` has them, and its processes."""
        self._processes = processes
        self._vocab_size, self.block_size = model.config.vocab_size, limits.block_size
        self.weights = Weights(model)
        served = with_implementation(model, implementation)
        self._graphdef = nnx.graphdef(make_invariant(served) if limits.batch_invariant else served)
        self._proposer = None if speculation is None else speculation.proposer
        num_drafts = 0 if speculation is None else speculation.num_tokens
        step = make_step(self._graphdef)
        self.graphs = limits.graphs(model, step, buckets, num_blocks, num_drafts)
        self._invariant = InvariantBuckets.among(self.graphs.buckets) if limits.batch_invariant else None
        how: dict[str, Any] = {"max_num_seqs": limits.max_num_seqs, "block_size": limits.block_size}
        how["wanted"] = False if limits.batch_invariant else cascade_attention
        self._cascades = cascade_steps_of(model, step, self.graphs.buckets, **how)
        self._leaves = self.graphs.leaves_of(self.weights.state)
        blocks = limits.blocks_of_layers(model, num_blocks)
        self._new_caches = functools.partial(model.create_caches, blocks, block_size=self.block_size, **cache)
        self._caches: Any = self._new_caches()
        near_layers = () if isinstance(blocks, int) else near_layers_of(model)
        self._copies = BlockCopies(limits.max_num_seqs, near_layers)
        specs = model.cache_specs(blocks, block_size=self.block_size, **cache)
        self._cache_spec = specs[near_layers.index(False) if near_layers else 0]
        self._near_spec = specs[near_layers.index(True)] if near_layers else None
        self._checks_batches = checks_batches
        self.num_steps = self.num_cascade_steps = 0
        self._in_flight: collections.deque[InFlight] = collections.deque()
        weakref.finalize(self, wait_for, self._in_flight)  # as the process ends, at the latest
        all_graphs = [self.graphs, *([] if self._cascades is None else [self._cascades.graphs])]
        of_all = [bucket for graphs in all_graphs for bucket in graphs.buckets]
        # Processes are told of the parameters in each step; placing them together would take all of them.
        self._sampling = StepSampling(None if processes is not None else replicated_sharding(model))
        self._samplers = Samplers(of_all, limits.max_num_seqs, model, self._sampling)
        self._max_rows = self._samplers.max_rows
        self._last_tokens = jnp.zeros(self._max_rows, jnp.int32)
        has_near = self._near_spec is not None
        empty = EmptySteps(self.block_size, self._samplers.rows_of, self._max_rows, has_near=has_near)
        prefixes: list[list[Any]] = [[], [np.zeros((), np.int32)]]
        self._runs = [  # of steps, and of those with a common prefix
            Runs(graphs, self.block_size, functools.partial(empty.inputs, prefix))
            for graphs, prefix in zip(all_graphs, prefixes, strict=False)
        ]

    @property
    def num_in_flight(self) -> int:
        """Steps started and not read."""
        return len(self._in_flight)

    @property
    def num_compiles(self) -> int:
        """Executables compiled, one a bucket, those of cascades and of a draft model too."""
        drafting = 0 if self._proposer is None else self._proposer.num_compiles
        return drafting + sum(runs.graphs.num_compiles for runs in self._runs)

    @property
    def is_verifying(self) -> bool:
        """Whether the last step started has drafts, and is not read."""
        return bool(self._in_flight) and self._in_flight[-1].step.num_draft_tokens > 0

    def reset(self) -> None:
        """Makes new caches and forgets the steps in flight: what a failed call was given is gone."""
        self._tell("reset")
        self._in_flight.clear()
        free(self._caches)  # before there is memory for others
        self._caches = self._new_caches()
        self._last_tokens = jnp.zeros(self._max_rows, jnp.int32)
        if self._proposer is not None:
            self._proposer.reset()

    def have_weights_changed(self) -> bool:
        """Whether the next step's weights are others than at the last look, however they were changed."""
        before, self._leaves = self._leaves, self.graphs.leaves_of(self.weights.state)
        return self._leaves is not before

    def explain(self) -> str:
        """As `Engine.explain`."""
        model = nnx.merge(self._graphdef, self.weights.refresh())
        return explain(model, self._caches, self.graphs.buckets, self.block_size)

    def update_weights(self, state: Any) -> None:
        """As `Engine.update_weights`."""
        on_host = None if self._processes is None else host_tree(state)
        self.weights.update(state)
        self._tell("update_weights", on_host)
        if self._processes is not None and not self._processes.leads:
            self.have_weights_changed()

    def cause_of(self, error: Exception) -> Exception:
        """What another process failed with, where that is why a step fails here; else what it failed with."""
        if self._processes is None or isinstance(error, ProcessError):
            return error
        text = self._processes.failure_elsewhere()
        return error if text is None else ProcessError(text)

    def follow(self) -> None:
        """As `Engine.follow`."""
        assert self._processes is not None
        running: collections.deque[Any] = collections.deque()
        try:
            for what, arguments in self._processes.heard():
                made = getattr(self, what)(*arguments)
                if what == "start":
                    running.append(made)
                if len(running) > MOST_IN_FLIGHT:
                    jax.block_until_ready(running.popleft())
        except BaseException as error:
            self._processes.fail(error)
            raise
        finally:
            self._processes.close()

    def _tell(self, what: str, *arguments: Any) -> None:
        """Has the other processes do what this one does, where there are others and this one leads."""
        if self._processes is not None and self._processes.leads:
            self._processes.send(what, *arguments)

    def precompile(self, progress: bool, wait: bool) -> None:
        """As `Engine.precompile`."""
        self._tell("precompile", False, wait)
        for runs in self._runs:
            runs.graphs.precompile(
                self.weights.refresh(),
                self._caches,
                block_size=self.block_size,
                inputs=runs.inputs,
                progress=progress,
                wait=wait,
                serves_all=runs.graphs is self.graphs,
            )
        if self._proposer is not None:
            self._proposer.precompile(progress=progress, wait=wait)
        sizes = lambda bucket: (self._samplers.rows_of(bucket), bucket.decode_query_len)
        needed = {sizes(bucket) for runs in self._runs for bucket in runs.graphs.executables}
        pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        compiling = [pool.submit(self._samplers.compile, *size) for size in needed]
        compiling += map(pool.submit, self._copies.compilers(self._caches))
        known = {sizes(bucket) for runs in self._runs for bucket in runs.graphs.buckets}
        for size in known - needed:
            pool.submit(self._samplers.compile, *size)
        for done in compiling:
            done.result()
        pool.shutdown(wait=wait)

    def cold_buckets(self, max_tokens: int | None = None) -> list[Cold]:
        """Those of no more tokens whose executables are there and have hardly run, smallest first."""
        runs = [*self._runs, *(() if self._proposer is None else self._proposer.runs)]
        cold = [Cold(place, bucket) for place, of in enumerate(runs) for bucket in of.cold(max_tokens)]
        return sorted(cold, key=lambda one: one.bucket.max_tokens)

    def warm_up(self, cold: Sequence[Cold]) -> None:
        """Runs these executables on no requests; waits for them."""
        self._tell("warm_up", cold)
        with self._fails_for_all(BaseException):
            leaves = self.graphs.leaves_of(self.weights.state)  # the last step's may have been donated
            for place, bucket in cold:
                if place < len(self._runs):
                    self._caches = self._runs[place].run(bucket, leaves, self._caches)
                elif self._proposer is not None:
                    self._proposer.warm_up(place - len(self._runs), bucket)

    def prepare(self, step: Step, generations: Sequence[Generation]) -> tuple[StepCall, ImplementationArg]:
        """What `start` is given for a step of these generations, one a row."""
        lens = np.asarray(step.query_lens)
        # Named where buckets have several: a prompt of 1 + k tokens would look like a row with drafts.
        query_len = None if self._proposer is None else 1 + step.num_draft_tokens
        prefix_len = 0 if self._cascades is None else self._cascades.prefix_len(step)
        graphs = self.graphs if self._cascades is None or not prefix_len else self._cascades.graphs
        sizes = {"num_blocks": step.block_tables.shape[1], "decode_query_len": query_len}
        bucket = graphs.choose(lens, **sizes) if self._invariant is None else self._invariant.of(step)
        metadata = build_batch_metadata(
            lens,
            np.asarray(step.seq_lens),
            step.block_tables,
            block_size=self.block_size,
            bucket=bucket,
            to_device=False,
        )
        if self._checks_batches:
            check_batch(metadata, self._cache_spec)
        near = near_tables(step, metadata, self._near_spec, checks=self._checks_batches)
        rows, before, last = self._samplers.rows_of(bucket), self._rows_before(), self._last_tokens
        sampling, num_generated = self._sampling.of(step, generations, rows)
        adjustments = step_adjustments(
            step, generations, before, last, num_rows=rows, vocab_size=self._vocab_size
        )
        drafts = None
        if step.num_draft_tokens and self._proposer is not None:
            places: Any = np.arange(bucket.max_tokens, dtype=np.int32)
            none_yet = np.zeros_like(places)
            tokens = StepTokens(none_yet, np.full_like(places, -1), last, places)
            num_drafts = [one.drafting.num_drafted for one in generations]
            prepared = self._proposer.prepare(step, generations, bucket, sampling, num_generated)
            drafts = prepared, np.pad(np.asarray(num_drafts, np.int32), (0, rows - len(num_drafts)))
        else:
            tokens = step_tokens(step, generations, bucket, before, last, rows)
        wanted = [generation.sampling_params.logprobs for generation in generations]
        parts = prompt_parts(step, generations, bucket)
        call = StepCall(
            block_copies=step.block_copies,
            near_copies=step.near_copies,
            metadata=metadata,
            prefix_len=prefix_len,
            tokens=tokens._replace(near=near, num_generated=num_generated),
            drafts=drafts,
            drawn_by=(sampling, adjustments),
            num_logprobs=most_wanted(wanted),
            prompt=PromptCall.of(parts, bucket),
        )
        return call, ImplementationArg(step, wanted, parts)

    def start(self, call: StepCall, asked: ImplementationArg | None = None) -> Any:
        """Starts a step; waits for nothing. Nobody asks in a process that follows: it gets the new tokens."""
        if self._processes is not None and asked is not None:
            call = call.on_host()
            self._tell("start", call)
        with self._fails_for_all(BaseException):
            call = call.after(self._last_tokens)
            self._caches = self._copies(self._caches, call.block_copies, call.near_copies)
            graphs = self.graphs if self._cascades is None or not call.prefix_len else self._cascades.graphs
            prefix = [np.asarray(call.prefix_len, np.int32)] if call.prefix_len else []
            tokens, drafts = self._drafted(call)
            outputs, self._caches = graphs(self._leaves, self._caches, call.metadata, tokens, *prefix)
            drawn_by = outputs.num_generated, *call.drawn_by
            sampled = self._samplers(outputs.logits, drafts, *drawn_by, call.num_logprobs)
            if isinstance(sampled, Sampled):
                self._last_tokens = sampled.tokens  # a step with drafts is read before the next one
            of_prompts = None
            if call.prompt is not None:
                next_ids, num = call.prompt
                state = self.weights.state
                of_prompts = prompt_logprobs(self._graphdef, state, outputs.hidden, next_ids, num=num)
            if asked is None:
                return sampled
            for array in jax.tree.leaves((sampled, of_prompts)):
                array.copy_to_host_async()
            self._in_flight.append(
                InFlight(asked.step, sampled, asked.num_logprobs, asked.prompt, of_prompts)
            )
            self.num_steps += 1
            self._runs[call.prefix_len > 0].num_runs[call.metadata.bucket] += 1
            self.num_cascade_steps += call.prefix_len > 0
            return None

    def read(self) -> Iterator[NewTokens]:
        """What the oldest step in flight brought; waits for it. Interrupted meanwhile, it loses nothing."""
        flying = self._in_flight[0]
        with self._fails_for_all(Exception):
            yield from new_tokens(flying, self._in_flight.popleft)

    # --------------------------------------------------------------------------------------- inside
    @contextlib.contextmanager
    def _fails_for_all(self, kind: type[BaseException]) -> Iterator[None]:
        """The others run this, too: where it fails here alone, they would wait for this process forever."""
        try:
            yield
        except kind as error:
            if self._processes is not None and self._processes.failure_elsewhere() is None:
                self._processes.fail(error)
            raise

    def _drafted(self, call: StepCall) -> tuple[StepTokens, tuple[Any, Any] | None]:
        """A step's tokens, and its drafts with their numbers; has the proposer begin with them."""
        if self._proposer is None:
            return call.tokens, None
        if call.block_copies:
            self._proposer.copy_blocks(call.block_copies)
        if call.drafts is None:
            return call.tokens, None
        prepared, num_drafts = call.drafts
        token_ids = self._proposer.start(prepared)
        return call.tokens._replace(ids=token_ids), (token_ids, num_drafts)

    def _rows_before(self) -> dict[int, int]:
        """Of each request in the step in flight, if there is one, its row of the sampler."""
        return {
            request_id: row
            for flying in self._in_flight
            for row, request_id in enumerate(flying.step.request_ids)
        }
