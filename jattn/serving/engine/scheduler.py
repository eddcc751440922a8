"""The scheduler: chooses the requests of each step and their numbers of tokens. Runs on the host."""

import bisect
import itertools
from collections.abc import Collection, Sequence

from jattn.serving.engine.block_manager import BlockHashes, BlockManager
from jattn.serving.engine.config import ResolvedConfig
from jattn.serving.engine.kv_cache_manager import KVCacheManager, LocalAttention
from jattn.serving.engine.scheduled_step import ScheduledRequest, Step, by_arrival
from jattn.serving.engine.step import BALANCE_TOKENS
from pallas_kernels.checks import require_positive


class Scheduler:
    """A first-come, first-served scheduler with continuous batching and chunked prefill under a token budget.

    Running requests come first, oldest first: decodes, then the rest of partly computed prompts. The
    remaining budget admits waiting requests once the blocks for all of their tokens are free. A running
    request without free blocks takes them from the latest request, so the oldest one can always finish and no
    request starves. A request with block hashes starts after the prefix that other requests have computed.

    Completions of one prompt wait until the first of them has computed it; other requests may overtake them
    meanwhile. Then they share its blocks, and each computes the prompt's last token in its own block. Waiting
    requests with shared blocks can be preempted like running ones.

    Blocks whose tokens no layer attends to any more are freed, so a request may be longer than the cache. If
    only some layers have a sliding window or chunks, these layers have their own blocks.

    With batch_invariant, steps alternate between prompt tokens and generated tokens, and a token's keys are
    always computed by the same type of step: only blocks of prompts are shared, and a preempted request
    recomputes its generated tokens one per step.

    Source: vLLM V1 `Scheduler.schedule`. Unlike vLLM, the latest request keeps its blocks and waits if it
    lacks a block; vLLM preempts it.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        local_attention: LocalAttention | None = None,
        batch_invariant: bool = False,
        longrope_threshold: int | None = None,
        sliding_window_manager: BlockManager | None = None,
        prefill_sizes: Sequence[int] = (),
    ) -> None:
        """Start without requests.

        Args:
            block_manager: Block manager that only this scheduler uses.
            max_num_seqs: Maximum number of requests per step.
            max_num_batched_tokens: Maximum number of new tokens per step, over all requests.
            local_attention: Windows and chunks of the model's layers, or of those that use
                sliding_window_manager. None: layers attend to the full context.
            batch_invariant: Whether prompt tokens and generated tokens run in separate steps.
            longrope_threshold: Length in tokens at which LongRoPE changes its frequencies: a request that
                exceeds it is recomputed. None: no such length.
            sliding_window_manager: Block manager of the layers with a window or chunks. None: all layers
                share block_manager.
            prefill_sizes: Numbers of prompt tokens that compiled steps are padded to. A prompt is split if
                two smaller steps take less time than one padded step. Empty: prompts are split only by the
                token budget.

        Raises:
            ValueError: If a limit is not positive, or sliding_window_manager has another block size or no
                local_attention.
        """
        require_positive(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.block_manager, self.sliding_window_manager = block_manager, sliding_window_manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.num_preemptions = self.num_prefix_tokens = self.num_prefix_hit_tokens = 0
        self.num_forked_tokens = self._num_forks = 0
        self._blocks = KVCacheManager(
            block_manager,
            max_num_batched_tokens,
            local_attention,
            batch_invariant,
            longrope_threshold,
            sliding_window_manager,
        )
        self._separates_prompts, self._had_prompts = batch_invariant, False
        self._prefill_sizes = sorted(prefill_sizes)
        # Each queue is in order of arrival. Requests with blocks arrived before all waiting requests.
        self._waiting: list[ScheduledRequest] = []
        self._forked: list[ScheduledRequest] = []  # waiting requests that share a prompt's blocks
        self._running: list[ScheduledRequest] = []
        self._requests: dict[int, ScheduledRequest] = {}
        self._new_arrivals = itertools.count()

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running requests."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Number of requests that have blocks and can run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for blocks, including preempted ones and completions of a prompt."""
        return len(self._requests) - self.num_running

    @property
    def capacity_tokens(self) -> int:
        """Maximum length of a request in tokens, limited by the KV cache.

        It is unlimited if old blocks are freed and a window fits the cache.
        """
        return self._blocks.max_request_tokens

    def add(
        self,
        request_id: int,
        num_prompt_tokens: int,
        max_tokens: int,
        hashes: BlockHashes | None = None,
        *,
        parent_id: int | None = None,
    ) -> None:
        """Add a request to the end of the queue.

        Args:
            request_id: Identifier that is not in use.
            num_prompt_tokens: Number of prompt tokens.
            max_tokens: Maximum number of generated tokens. The last one needs no cache slot.
            hashes: Hashes of the request's full blocks, kept up to date by the caller. None: the request
                neither reuses nor caches blocks.
            parent_id: Identifier of a request with the same prompt, which computes it for both. None: no
                parent.

        Raises:
            ValueError: If the identifier is in use, the request is empty or does not fit the cache, or the
                parent has started or has another prompt length.
        """
        require_positive(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id} is already in use. Pass a unique id per request.")
        num_tokens = num_prompt_tokens + max_tokens - 1
        if num_tokens > self.capacity_tokens:
            raise ValueError(
                f"Request {request_id} needs {num_tokens} tokens of the KV cache (num_prompt_tokens "
                f"+ max_tokens - 1), but the cache holds only {self.capacity_tokens}. "
                "Increase num_blocks or reduce max_tokens."
            )
        request = ScheduledRequest(request_id, next(self._new_arrivals), num_prompt_tokens, hashes)
        if parent_id is None:
            self._waiting.append(request)
        else:
            parent = self._requests[parent_id]
            request.wait_for(parent, is_begun=parent in self._forked)
        self._requests[request_id] = request

    def __contains__(self, request_id: int) -> bool:
        """Return whether a request is unfinished."""
        return request_id in self._requests

    @property
    def running(self) -> list[int]:
        """Identifiers of the requests that have blocks, in order of arrival."""
        return [request.request_id for request in self._running]

    def can_draft(self, num_draft_tokens: int) -> bool:
        """Return whether the next step can have this many draft tokens per row without preempting a request.

        That is the case if every running request decodes and no waiting request could be admitted.
        """
        count, rows = 1 + num_draft_tokens, self._running
        if not rows or any(request.num_new != 1 or not request.num_computed for request in rows):
            return False
        if count * len(rows) > self.max_num_batched_tokens or self._blocks.crossing_threshold(
            rows, num_draft_tokens
        ):
            return False
        can_admit_more = (self._waiting or self._forked) and len(rows) < self.max_num_seqs
        return not can_admit_more and self._blocks.can_extend(rows, count)

    def schedule(self, num_draft_tokens: int = 0) -> Step | None:
        """Return the next step with its blocks allocated, or None if there is nothing to run.

        Call `update_after_start` once the step has been started; otherwise the same rows are scheduled again.

        Args:
            num_draft_tokens: Number of draft tokens per row. Ignored unless `can_draft` allows it.
        """
        num_drafts = num_draft_tokens if num_draft_tokens and self.can_draft(num_draft_tokens) else 0
        if self._num_forks != self.block_manager.num_forks:
            self._num_forks = self.block_manager.num_forks
            for request in self._running:  # Their last blocks may be shared now.
                request.token_capacity = 0
        recomputed = self._blocks.crossing_threshold(self._running)
        preempted = [self._preempt(self._running, self._running.index(request)) for request in recomputed]
        chunks = self._chunks(num_drafts, preempted)
        while not chunks and (self._forked or len(self._running) > 1):  # a deadlock over free blocks
            preempted.append(self._preempt(self._queue_of_latest()))
            chunks = self._chunks(num_drafts, preempted)
        # Recomputed requests lost no blocks to other requests.
        self.num_preemptions += len(preempted) - len(recomputed)
        if not chunks:
            return None
        return build_step(
            chunks,
            self._blocks,
            preempted,
            num_draft_tokens=num_drafts,
            separates_prompts=self._separates_prompts,
        )

    def _chunks(self, num_drafts: int, preempted: list[int]) -> list[tuple[ScheduledRequest, int]]:
        """Choose requests and their numbers of tokens. Preempted requests are appended to `preempted`."""
        if not self._separates_prompts:
            chunks = self._phase_chunks(None, num_drafts, preempted)
            if chunks and chunks[-1][1] > 1 and not num_drafts:
                self._split_last_prompt(chunks)
            return chunks
        for prompts_only in (not self._had_prompts, self._had_prompts):
            if chunks := self._phase_chunks(prompts_only, num_drafts, preempted):
                return chunks
        return []

    def _phase_chunks(
        self, prompts_only: bool | None, num_drafts: int, preempted: list[int]
    ) -> list[tuple[ScheduledRequest, int]]:
        """Choose prompt tokens only (True), generated tokens only (False), or both (None); see `_chunks`."""
        chunks: list[tuple[ScheduledRequest, int]] = []
        budget, num_others = self.max_num_batched_tokens, 0
        for request in self._running:  # The latest request may be preempted in the loop.
            count = request.num_tokens - request.num_computed + num_drafts
            if prompts_only is not None:
                if request.is_in_prompt != prompts_only:
                    num_others += 1
                    continue
                count = request.num_next_same_type
            count = budget if count > budget else count  # faster than min()
            if request.num_computed + count > request.token_capacity:
                count = self._extend_running(request, count, preempted)
            if count == 0:
                break
            chunks.append((request, count))
            budget -= count
        if len(chunks) + num_others == len(self._running) and not num_drafts and prompts_only is not False:
            chunks += self._admit(budget)
        return chunks

    def _split_last_prompt(self, chunks: list[tuple[ScheduledRequest, int]]) -> None:
        """Shorten the last prompt's chunk if two smaller steps take less time than one padded step."""
        request, count = chunks[-1]
        num_tokens, sizes = sum([count for _, count in chunks if count > 1]), self._prefill_sizes
        index = bisect.bisect_left(sizes, num_tokens)
        if not 0 < index < len(sizes):
            return
        rest = num_tokens - sizes[index - 1]
        rest_size = sizes[bisect.bisect_left(sizes, rest)]
        if rest < count and sizes[index - 1] + max(rest_size, BALANCE_TOKENS) < sizes[index]:
            chunks[-1] = request, count - rest

    def update_after_start(self, step: Step, finished: Collection[int] = ()) -> None:
        """Record that a step has been started: each row that samples gains a token, unless it is finished.

        The token need not be known yet; a request that turns out to have ended is aborted later. Draft tokens
        count as rejected until `accept` is called.

        Args:
            step: Step returned by `schedule`.
            finished: Requests that end with this step; their blocks are freed.
        """
        self._had_prompts = step.num_decodes < len(step.request_ids)
        block_size = self.block_manager.block_size
        for request_id, count, samples in zip(step.request_ids, step.query_lens, step.samples, strict=True):
            request = self._requests[request_id]
            request.num_computed += count - step.num_draft_tokens
            request.num_tokens += samples
            if request.num_computed >= (request.num_cached_blocks + 1) * block_size:
                self._blocks.cache_full_blocks(request)  # The device runs steps in order.
            if request.completions and request.num_computed >= request.num_shared_prompt_tokens:
                self._fork(request)
            if count > 1:  # A prompt chunk. For single tokens, see num_fitting_tokens.
                self._blocks.free_skipped_blocks(request)
        self._blocks.pending_copies.clear()
        for request_id in finished:
            self.abort(request_id)

    def accept(self, request_id: int, num_draft_tokens: int) -> None:
        """Record how many draft tokens of a request's last step are accepted, before the next `schedule`.

        Blocks allocated for rejected tokens are kept for later tokens.
        """
        request = self._requests[request_id]
        request.num_computed += num_draft_tokens
        request.num_tokens += num_draft_tokens

    def abort(self, request_id: int) -> None:
        """Remove a request in any state, and free its blocks."""
        request = self._requests.pop(request_id)
        if request.parent is not None:
            request.parent.completions.remove(request)
            return
        if request.completions:
            bisect.insort(self._waiting, request.promote_completion(), key=by_arrival)
        for queue in (self._running, self._forked, self._waiting):
            if request in queue:
                queue.remove(request)
                if queue is not self._waiting:
                    self._blocks.free(request)

    def abort_all(self) -> None:
        """Remove all requests and cached prefixes, whatever state an error has left them in."""
        self._waiting, self._forked, self._running, self._requests = [], [], [], {}
        self._blocks.free_all()

    def reset_prefix_cache(self) -> None:
        """Discard all cached prefixes, because the weights have changed."""
        self._blocks.reset_prefix_cache()
        for request in (*self._running, *self._forked):
            request.is_stale = True

    # --------------------------------------------------------------------------------------- inside
    def _fork(self, parent: ScheduledRequest) -> None:
        """Share a computed prompt's blocks, without its last token, with the completions that wait for it."""
        for request in parent.completions:
            request.parent = None
            if parent.num_shared_prompt_tokens:
                self._blocks.fork(parent, request)
            self.num_forked_tokens += parent.num_shared_prompt_tokens
            queue = self._forked if parent.num_shared_prompt_tokens else self._waiting
            bisect.insort(queue, request, key=by_arrival)
        parent.completions = []

    def _extend_running(self, request: ScheduledRequest, count: int, preempted: list[int]) -> int:
        """Return how many of the next `count` tokens have room; 0 if the request must wait."""
        count = self._blocks.num_fitting_tokens(request, count)
        end = request.num_computed + count
        preempted += self._make_room(request, end)
        return count if self._blocks.extend(request, end) else 0

    def _make_room(self, request: ScheduledRequest, end: int) -> list[int]:
        """Preempt the latest requests until `request` has room up to token `end` or is itself the latest."""
        preempted = []
        while (
            self._blocks.num_missing(request, end) > 0
            and (queue := self._queue_of_latest())[-1] is not request
        ):
            preempted.append(self._preempt(queue))
        return preempted

    def _queue_of_latest(self) -> list[ScheduledRequest]:
        """Return the queue whose last request is the latest of all that have blocks."""
        return max((self._running, self._forked), key=lambda queue: queue[-1].arrival if queue else -1)

    def _preempt(self, queue: list[ScheduledRequest], index: int = -1) -> int:
        """Free the blocks of a queue's request, by default the last, and return it to the waiting queue."""
        victim = queue.pop(index)
        self._blocks.free(victim)
        victim.forget()
        bisect.insort(self._waiting, victim, key=by_arrival)
        return victim.request_id

    def _admit(self, budget: int) -> list[tuple[ScheduledRequest, int]]:
        """Start waiting requests within the remaining budget, oldest first, and return their chunks."""
        chunks = []
        while budget > 0 and len(self._running) < self.max_num_seqs:
            queues = [queue for queue in (self._forked, self._waiting) if queue]
            if not queues:
                break
            queue = min(queues, key=lambda queue: queue[0].arrival)
            request = queue[0]
            is_new = queue is self._waiting
            count = (
                self._blocks.start(request, budget) if is_new else self._blocks.resume_fork(request, budget)
            )
            if count == 0:
                break
            del queue[0]
            if is_new and request.hashes is not None:  # Otherwise nothing was looked up.
                self.num_prefix_tokens += request.num_tokens
                self.num_prefix_hit_tokens += request.num_computed
            bisect.insort(self._running, request, key=by_arrival)
            chunks.append((request, count))
            budget -= count
        return chunks


def make_scheduler(config: ResolvedConfig) -> Scheduler:
    """Create an engine's scheduler."""
    window_manager = None
    if config.num_window_blocks:
        window_manager = BlockManager(config.num_window_blocks, config.block_size)
    prefill_buckets = [bucket for bucket in config.buckets if bucket.max_prefill_tokens]
    max_decodes = max([bucket.max_decodes for bucket in prefill_buckets], default=0)
    # Sizes for any number of decodes.
    prefill_sizes = {
        bucket.max_prefill_tokens for bucket in prefill_buckets if bucket.max_decodes == max_decodes
    }
    return Scheduler(
        BlockManager(config.num_blocks, config.block_size),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        local_attention=config.local_attention,
        batch_invariant=config.batch_invariant,
        longrope_threshold=config.longrope_threshold,
        sliding_window_manager=window_manager,
        prefill_sizes=sorted(prefill_sizes),
    )


def build_step(
    chunks: list[tuple[ScheduledRequest, int]],
    blocks: KVCacheManager,
    preempted: Sequence[int],
    *,
    num_draft_tokens: int,
    separates_prompts: bool,
) -> Step:
    """Build a step from scheduled requests.

    Args:
        chunks: Scheduled requests with their numbers of new tokens; at least one.
        blocks: KV-cache manager that has allocated their blocks.
        preempted: Identifiers of the preempted requests.
        num_draft_tokens: Number of draft tokens per row, included in the numbers of new tokens.
        separates_prompts: Whether decode rows are exactly the rows with generated tokens (batch_invariant).
    """
    if separates_prompts:
        is_decode = [not request.is_in_prompt for request, _ in chunks]
    else:
        is_decode = [count == 1 + num_draft_tokens and request.num_computed > 0 for request, count in chunks]
    if not all(is_decode):
        order = sorted(range(len(chunks)), key=lambda i: (not is_decode[i], chunks[i][0].arrival))
        chunks = [chunks[i] for i in order]
    request_ids = tuple([request.request_id for request, _ in chunks])
    tables, *sliding_window_tables = blocks.block_tables(request_ids)
    pending_copies, *sliding_window_copies = blocks.block_copies_of(request_ids)
    return Step(
        request_ids=request_ids,
        query_lens=tuple([count for _, count in chunks]),
        seq_lens=tuple([request.num_computed + count for request, count in chunks]),
        block_tables=tables,
        block_copies=pending_copies,
        samples=tuple(
            [
                request.num_tokens - request.num_computed + num_draft_tokens == count
                for request, count in chunks
            ]
        ),
        num_decodes=sum(is_decode),
        preempted=tuple(preempted),
        num_draft_tokens=num_draft_tokens,
        sliding_window_tables=sliding_window_tables[0] if sliding_window_tables else None,
        sliding_window_copies=sliding_window_copies[0] if sliding_window_copies else (),
    )
