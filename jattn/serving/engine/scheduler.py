"""Which requests run next, and how many tokens of each. Host side: ints only."""

import bisect
import itertools
from collections.abc import Collection, Sequence

from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.kv_cache_groups import Reach
from jattn.serving.engine.kv_cache_manager import Allocator
from jattn.serving.engine.prefix_cache import BlockHashes
from jattn.serving.engine.scheduled_step import Progress, Step, by_arrival
from pallas_kernels.checks import require, require_positive


class Scheduler:
    """Continuous batching with chunked prefill: first come, first served, under a budget of tokens.

    Running requests come first, oldest first: decodes, then the rest of prompts that are partly computed.
    What is left of the budget admits waiting ones, once the blocks for all their tokens are free. A running
    request that is out of blocks takes them from the latest; so the oldest can always finish, and nobody
    starves. A request that comes with the hashes of its blocks begins behind those that others have computed.

    Completions of one prompt wait until the first of them has computed it, and let others pass meanwhile.
    Then they share its blocks: each computes the prompt's last token itself, in a block of its own. Those
    that wait with shared blocks lose them like one that runs.

    What no layer of the model will see again is given up, so that a request may be longer than the cache;
    layers that see less than others have blocks of their own to give up.

    With batch_invariant a step has tokens of prompts or generated ones, in turn, and a token's keys are made
    by a step of its own kind: blocks of prompts alone are shared, and what a preempted request had generated
    is run again one token a step.

    Source: vLLM V1 `Scheduler.schedule`; differs in that the latest request, short of a block, waits with
    what it has, where vLLM preempts it.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        reach: Reach | None = None,
        batch_invariant: bool = False,
        turning_length: int | None = None,
        near_manager: BlockManager | None = None,
    ) -> None:
        """Starts without requests.

        Args:
            block_manager: Whose blocks; nobody else may take from it.
            max_num_seqs: Most requests of a step.
            max_num_batched_tokens: Most new tokens of a step, all requests together.
            reach: How far back the model looks, or near_manager's layers do; None = to the beginning.
            batch_invariant: Prompts and generated tokens have steps of their own.
            turning_length: A request that passes it is computed again, and begins beyond it; None = none.
            near_manager: Blocks of layers that look back less than the others; None = all layers are alike.

        Raises:
            ValueError: A limit is not positive, near_manager has another block size, or there is no reach.
        """
        require_positive(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.block_manager, self.near_manager = block_manager, near_manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.num_preemptions = self.num_prefix_tokens = self.num_prefix_hit_tokens = 0
        self.num_forked_tokens = self._num_forks = 0
        how = (max_num_batched_tokens, reach, batch_invariant, turning_length, near_manager)
        self._blocks = Allocator(block_manager, *how)
        self._are_apart, self._had_prompts = batch_invariant, False
        # Each in order of arrival. Who has blocks, runs or is forked, came before all who wait.
        self._waiting: list[Progress] = []
        self._forked: list[Progress] = []  # these wait, too, with what they share
        self._running: list[Progress] = []
        self._known: dict[int, Progress] = {}
        self._new_arrivals = itertools.count()

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._known)

    @property
    def num_running(self) -> int:
        """Requests that have blocks to run in."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that have none yet, lost theirs, or share those of a prompt until they can run."""
        return len(self._known) - self.num_running

    @property
    def capacity_tokens(self) -> int:
        """Tokens that a request may have: those that fit the cache; any number where it gives old ones up."""
        return self._blocks.longest

    def add(
        self,
        request_id: int,
        num_prompt_tokens: int,
        max_tokens: int,
        hashes: BlockHashes | None = None,
        *,
        parent_id: int | None = None,
    ) -> None:
        """Puts a request at the end of the queue.

        Args:
            request_id: A new name.
            num_prompt_tokens: Tokens that it starts with.
            max_tokens: Most tokens that it will generate. The last of them needs no place in the cache.
            hashes: Of its tokens as far as the host knows them, kept up to date by the caller. None = it
                neither takes blocks from others nor leaves any.
            parent_id: The request whose prompt it has, which computes it for both. None = nobody's.

        Raises:
            ValueError: hashes are of another block size, or the request would not fit the cache if it were
                alone, is empty, or is there already; there is no such parent, its prompt is computed, or it
                has another length.
        """
        require_positive(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        require(request_id not in self._known, "request_id", "be new", request_id)
        if hashes is not None:
            size = self.block_manager.block_size
            require(hashes.block_size == size, "hashes.block_size", f"be {size}", hashes.block_size)
        most = num_prompt_tokens + max_tokens - 1
        rule = f"fit the cache's {self.capacity_tokens} tokens"
        name = f"num_prompt_tokens + max_tokens - 1 of request {request_id}"
        require(most <= self.capacity_tokens, name, rule, most)
        request = Progress(request_id, next(self._new_arrivals), num_prompt_tokens, hashes)
        if parent_id is None:
            self._waiting.append(request)
        else:
            require(parent_id in self._known, "parent_id", "wait or run", parent_id)
            parent = self._known[parent_id]
            request.wait_for(parent, is_begun=parent in self._forked)
        self._known[request_id] = request

    def __contains__(self, request_id: int) -> bool:
        """Whether a request waits or runs."""
        return request_id in self._known

    @property
    def running(self) -> list[int]:
        """Requests that have blocks, in order of arrival."""
        return [request.request_id for request in self._running]

    def can_draft(self, num_draft_tokens: int) -> bool:
        """Whether the next step can have so many drafts a row: all decode, and nobody pays with blocks."""
        count, rows = 1 + num_draft_tokens, self._running
        if not rows or any(request.num_new != 1 or not request.num_computed for request in rows):
            return False
        if count * len(rows) > self.max_num_batched_tokens or self._blocks.turning(rows, num_draft_tokens):
            return False
        is_wanted = (self._waiting or self._forked) and len(rows) < self.max_num_seqs
        return not is_wanted and self._blocks.can_extend(rows, count)

    def schedule(self, num_draft_tokens: int = 0) -> Step | None:
        """The next step, its blocks allocated; None if there is nothing to run.

        Follow it with `complete` once it is on its way; without, the same rows are scheduled again.

        Args:
            num_draft_tokens: Drafts for each row, where `can_draft`; else the step is one without drafts.
        """
        drafts = num_draft_tokens if num_draft_tokens and self.can_draft(num_draft_tokens) else 0
        if self._num_forks != self._blocks.num_forks:
            self._num_forks = self._blocks.num_forks
            for request in self._running:  # what one was to write into may be shared now
                request.room = 0
        again = self._blocks.turning(self._running)
        preempted = [self._preempt(self._running, self._running.index(request)) for request in again]
        chunks = self._chunks(drafts, preempted)
        while not chunks and (self._forked or len(self._running) > 1):  # all wait for each other's blocks
            preempted.append(self._preempt(self._latest()))
            chunks = self._chunks(drafts, preempted)
        self.num_preemptions += len(preempted) - len(again)  # those that turn lost nothing to others
        if not chunks:
            return None
        return build_step(chunks, self._blocks, preempted, num_draft_tokens=drafts, are_apart=self._are_apart)

    def _chunks(self, drafts: int, preempted: list[int]) -> list[tuple[Progress, int]]:
        """Who runs, and how many tokens of each; who loses blocks to them is added to `preempted`."""
        if not self._are_apart:
            return self._chunks_of(None, drafts, preempted)
        for of_prompts in (not self._had_prompts, self._had_prompts):
            if chunks := self._chunks_of(of_prompts, drafts, preempted):
                return chunks
        return []

    def _chunks_of(
        self, of_prompts: bool | None, drafts: int, preempted: list[int]
    ) -> list[tuple[Progress, int]]:
        """`_chunks` of tokens of prompts alone, of generated ones alone, or (None) of both."""
        chunks: list[tuple[Progress, int]] = []
        budget, num_others = self.max_num_batched_tokens, 0
        for request in self._running:  # the latest may leave it meanwhile
            count = request.num_tokens - request.num_computed + drafts
            if of_prompts is not None:
                if request.is_in_prompt != of_prompts:
                    num_others += 1
                    continue
                count = request.num_alike
            count = budget if count > budget else count  # min() takes longer
            if request.num_computed + count > request.room:
                count = self._extended(request, count, preempted)
            if count == 0:
                break
            chunks.append((request, count))
            budget -= count
        if len(chunks) + num_others == len(self._running) and not drafts and of_prompts is not False:
            chunks += self._admit(budget)
        return chunks

    def complete(self, step: Step, finished: Collection[int] = ()) -> None:
        """Notes that a step runs: each row that samples has one more token, unless it is finished.

        The token need not be known yet; a request that turns out to have ended is aborted. Of drafts none is
        taken to stay: `accept` says which do.

        Args:
            step: From `schedule`.
            finished: Requests that end here; their blocks are freed.

        Raises:
            ValueError: A finished request has no row that samples.
        """
        if finished:
            sampled = set(itertools.compress(step.request_ids, step.samples))
            require(sampled.issuperset(finished), "finished", f"be among {sorted(sampled)}", sorted(finished))
        self._had_prompts = step.num_prefills > 0
        size = self.block_manager.block_size
        for request_id, count, samples in zip(step.request_ids, step.query_lens, step.samples, strict=True):
            request = self._known[request_id]
            request.num_computed += count - step.num_draft_tokens
            request.num_tokens += samples
            if request.num_computed >= (request.num_published + 1) * size:
                self._blocks.publish(request)  # the device takes steps in order: who reads comes later
            if request.completions and request.num_computed >= request.num_shared:
                self._fork(request)
            if count > 1:  # a piece of a prompt; one token more is given up with the next block
                self._blocks.give_up(request)
        self._blocks.copies.clear()
        for request_id in finished:
            self.abort(request_id)

    def accept(self, request_id: int, num_draft_tokens: int) -> None:
        """Notes that so many drafts of a request's last step stay, before any other step is scheduled.

        The blocks that the others took stay for the tokens to come.

        Raises:
            ValueError: No such request.
        """
        require(request_id in self._known, "request_id", "wait or run", request_id)
        request = self._known[request_id]
        request.num_computed += num_draft_tokens
        request.num_tokens += num_draft_tokens

    def abort(self, request_id: int) -> None:
        """Drops a request, wherever it is, and frees its blocks.

        Raises:
            ValueError: No such request.
        """
        require(request_id in self._known, "request_id", "wait or run", request_id)
        request = self._known.pop(request_id)
        if request.parent is not None:
            request.parent.completions.remove(request)
            return
        if request.completions:
            bisect.insort(self._waiting, request.heir(), key=by_arrival)
        for queue in (self._running, self._forked, self._waiting):
            if request in queue:
                queue.remove(request)
                if queue is not self._waiting:
                    self._blocks.free(request)

    def abort_all(self) -> None:
        """Drops every request, and what is cached, in whatever state an error left them."""
        self._waiting, self._forked, self._running, self._known = [], [], [], {}
        self._blocks.free_all()

    def forget_prefixes(self) -> None:
        """Nothing that is cached now will be found by requests to come: the weights have changed."""
        self._blocks.unpublish_all()
        for request in (*self._running, *self._forked):
            request.is_stale = True

    # --------------------------------------------------------------------------------------- inside
    def _fork(self, parent: Progress) -> None:
        """Lets those that waited for a prompt have its blocks, all but the last token."""
        for request in parent.completions:
            request.parent = None
            if parent.num_shared:
                self._blocks.fork(parent, request)
            self.num_forked_tokens += parent.num_shared
            queue = self._forked if parent.num_shared else self._waiting
            bisect.insort(queue, request, key=by_arrival)
        parent.completions = []

    def _extended(self, request: Progress, count: int, preempted: list[int]) -> int:
        """How many of a running request's next `count` tokens have room; 0 = it is the latest, and waits."""
        count = self._blocks.fitting(request, count)
        end = request.num_computed + count
        preempted += self._make_room(request, end)
        return count if self._blocks.extend(request, end) else 0

    def _make_room(self, request: Progress, end: int) -> list[int]:
        """Takes the latest requests' blocks until `request` can have its tokens or is the latest."""
        preempted = []
        while self._blocks.num_missing(request, end) > 0 and (queue := self._latest())[-1] is not request:
            preempted.append(self._preempt(queue))
        return preempted

    def _latest(self) -> list[Progress]:
        """The queue whose last request is the latest of all that have blocks."""
        return max((self._running, self._forked), key=lambda queue: queue[-1].arrival if queue else -1)

    def _preempt(self, queue: list[Progress], place: int = -1) -> int:
        """Takes the blocks of a request, a queue's last or another, which waits to be computed again."""
        victim = queue.pop(place)
        self._blocks.free(victim)
        victim.forget()
        bisect.insort(self._waiting, victim, key=by_arrival)
        return victim.request_id

    def _admit(self, budget: int) -> list[tuple[Progress, int]]:
        """Those that may begin with what is left of the budget, oldest first, and how many tokens of each."""
        chunks = []
        while budget > 0 and len(self._running) < self.max_num_seqs:
            queues = [queue for queue in (self._forked, self._waiting) if queue]
            if not queues:
                break
            queue = min(queues, key=lambda queue: queue[0].arrival)
            request = queue[0]
            is_new = queue is self._waiting
            count = self._blocks.begin(request, budget) if is_new else self._blocks.go_on(request, budget)
            if count == 0:
                break
            del queue[0]
            if is_new and request.hashes is not None:  # else there was nothing to look up
                self.num_prefix_tokens += request.num_tokens
                self.num_prefix_hit_tokens += request.num_computed
            bisect.insort(self._running, request, key=by_arrival)
            chunks.append((request, count))
            budget -= count
        return chunks


def build_step(
    chunks: list[tuple[Progress, int]],
    blocks: Allocator,
    preempted: Sequence[int],
    *,
    num_draft_tokens: int,
    are_apart: bool,
) -> Step:
    """A step of some requests.

    Args:
        chunks: Each with the number of its new tokens; at least one.
        blocks: Whose, allocated.
        preempted: As in Step.
        num_draft_tokens: Likewise; in each of the numbers.
        are_apart: Decode rows are those with a generated token, be they alone in the step.
    """
    if are_apart:
        is_decode = [not request.is_in_prompt for request, _ in chunks]
    else:
        is_decode = [count == 1 + num_draft_tokens and one.num_computed > 0 for one, count in chunks]
    if not all(is_decode):
        order = sorted(range(len(chunks)), key=lambda i: (not is_decode[i], chunks[i][0].arrival))
        chunks = [chunks[i] for i in order]
    request_ids = tuple([request.request_id for request, _ in chunks])
    tables, *near_tables = blocks.block_tables(request_ids)
    copies, *near_copies = blocks.copies_of(request_ids)
    return Step(
        request_ids=request_ids,
        query_lens=tuple([count for _, count in chunks]),
        seq_lens=tuple([request.num_computed + count for request, count in chunks]),
        block_tables=tables,
        block_copies=copies,
        samples=tuple([request.num_new + num_draft_tokens == count for request, count in chunks]),
        num_decodes=sum(is_decode),
        preempted=tuple(preempted),
        num_draft_tokens=num_draft_tokens,
        near_tables=near_tables[0] if near_tables else None,
        near_copies=near_copies[0] if near_copies else (),
    )
