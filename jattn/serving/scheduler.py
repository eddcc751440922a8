"""Which requests run next, and how many tokens of each. Host side: ints only."""

import collections
import dataclasses
from collections.abc import Collection

from jattn.serving.block_manager import BlockManager
from jattn.serving.prefix_cache import BlockHashes
from pallas_kernels.checks import require, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What runs next: one row per request, decode rows before prefill rows, each in order of arrival.

    Attributes:
        request_ids: The request of each row.
        query_lens: New tokens of each row.
        seq_lens: Tokens of each row once it has run, the new ones included.
        block_tables: Blocks of each row, enough for seq_lens.
        block_copies: (source, target) blocks to copy before the step runs (`jattn.copy_blocks`): rows that
            would write into a block that others share have one of their own now.
        samples: Whether the row's last token is the last one that its request has: its logits make the next.
        num_decodes: Leading rows with exactly one new token and context before it.
        preempted: Requests that lost their blocks to make room; they wait to be computed again.
    """

    request_ids: tuple[int, ...]
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    block_copies: tuple[tuple[int, int], ...]
    samples: tuple[bool, ...]
    num_decodes: int
    preempted: tuple[int, ...]

    @property
    def num_prefills(self) -> int:
        """Rows behind the decode rows."""
        return len(self.request_ids) - self.num_decodes

    @property
    def num_prefill_tokens(self) -> int:
        """New tokens of the prefill rows."""
        return sum(self.query_lens[self.num_decodes :])

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(self.query_lens)


@dataclasses.dataclass(eq=False)
class _Progress:
    """How far a request is: tokens that it has (prompt and generated), and how many of them are cached.

    Its first num_published blocks others can find; none more where its keys are those of old weights.
    """

    request_id: int
    num_tokens: int
    hashes: BlockHashes | None
    num_computed: int = 0
    num_published: int = 0
    is_stale: bool = False

    @property
    def num_new(self) -> int:
        return self.num_tokens - self.num_computed


class Scheduler:
    """Continuous batching with chunked prefill: first come, first served, under a budget of tokens.

    Running requests come first, oldest first: decodes, then the rest of prompts that are partly computed.
    What is left of the budget admits waiting ones, once the blocks for all their tokens are free. A running
    request that is out of blocks takes them from the latest; so the oldest can always finish, and nobody
    starves. A request that comes with the hashes of its blocks begins behind those that others have computed.

    Source: vLLM V1 `Scheduler.schedule`; differs in that the latest request, short of a block, waits with
    what it has, where vLLM preempts it.
    """

    def __init__(
        self, block_manager: BlockManager, *, max_num_seqs: int = 16, max_num_batched_tokens: int = 512
    ) -> None:
        """Starts without requests.

        Args:
            block_manager: Whose blocks; nobody else may take from it.
            max_num_seqs: Most requests of a step.
            max_num_batched_tokens: Most new tokens of a step, all requests together.

        Raises:
            ValueError: A limit is not positive.
        """
        require_positive(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.block_manager = block_manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.num_preemptions = self.num_prefix_tokens = self.num_prefix_hit_tokens = 0
        self._waiting: collections.deque[_Progress] = collections.deque()  # oldest first, as _running,
        self._running: list[_Progress] = []  # which are all older
        self._known: set[int] = set()
        self._copies: dict[int, list[tuple[int, int]]] = {}  # of each request, until its step has run

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return self.num_waiting + self.num_running

    @property
    def num_running(self) -> int:
        """Requests that have blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that have none yet, or lost theirs."""
        return len(self._waiting)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit the cache."""
        return self.block_manager.capacity * self.block_manager.block_size

    def add(
        self,
        request_id: int,
        num_prompt_tokens: int,
        max_tokens: int,
        hashes: BlockHashes | None = None,
    ) -> None:
        """Puts a request at the end of the queue.

        Args:
            request_id: A new name.
            num_prompt_tokens: Tokens that it starts with.
            max_tokens: Most tokens that it will generate. The last of them needs no place in the cache.
            hashes: Of its tokens as far as the host knows them, kept up to date by the caller. None = it
                neither takes blocks from others nor leaves any.

        Raises:
            ValueError: hashes are of another block size, or the request would not fit the cache if it were
                alone, is empty, or is there already.
        """
        counts = {"num_prompt_tokens": num_prompt_tokens, "max_tokens": max_tokens}
        require_positive(**counts)
        require(request_id not in self._known, "request_id", "be new", request_id)
        if hashes is not None:
            size = self.block_manager.block_size
            require(hashes.block_size == size, "hashes.block_size", f"be {size}", hashes.block_size)
        most = num_prompt_tokens + max_tokens - 1
        rule = f"fit the cache's {self.capacity_tokens} tokens"
        name = f"num_prompt_tokens + max_tokens - 1 of request {request_id}"
        require(most <= self.capacity_tokens, name, rule, most)
        self._waiting.append(_Progress(request_id, num_prompt_tokens, hashes))
        self._known.add(request_id)

    def schedule(self) -> Step | None:
        """The next step, its blocks allocated; None if there is nothing to run.

        Follow it with `complete` once it is on its way; without, the same rows are scheduled again.
        """
        chunks: list[tuple[_Progress, int]] = []
        preempted: list[int] = []
        budget, index = self.max_num_batched_tokens, 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            count = min(request.num_new, budget)
            missing = request.num_computed + count - self.block_manager.num_tokens(request.request_id)
            missing = max(missing, 0)  # less than count where the last step was never completed
            preempted += self._make_room(request, missing)
            if self.block_manager.blocks_to_append(request.request_id, missing) > self.block_manager.num_free:
                break  # the latest of all: it waits, with the blocks it has
            if copies := self.block_manager.append(request.request_id, missing):
                self._copies[request.request_id] = copies
            chunks.append((request, count))
            budget, index = budget - count, index + 1
        while budget > 0 and len(chunks) == len(self._running):
            found = self._admissible()
            if found is None:
                break
            request = self._waiting.popleft()
            self._running.append(request)
            request.num_computed = len(found) * self.block_manager.block_size
            request.num_published = len(found)
            self.num_prefix_tokens += request.num_tokens
            self.num_prefix_hit_tokens += request.num_computed
            count = min(request.num_new, budget)
            self.block_manager.allocate(request.request_id, request.num_computed + count, found)
            chunks.append((request, count))
            budget -= count
        return self._step(chunks, preempted) if chunks else None

    def complete(self, step: Step, finished: Collection[int] = ()) -> None:
        """Notes that a step runs: each row that samples has one more token, unless it is finished.

        The token need not be known yet; a request that turns out to have ended is aborted.

        Args:
            step: From `schedule`.
            finished: Requests that end here; their blocks are freed.

        Raises:
            ValueError: A finished request has no row that samples.
        """
        sampled = {r for r, samples in zip(step.request_ids, step.samples, strict=True) if samples}
        require(set(finished) <= sampled, "finished", f"be among {sorted(sampled)}", sorted(finished))
        by_id = {request.request_id: request for request in self._running}
        for request_id, count in zip(step.request_ids, step.query_lens, strict=True):
            by_id[request_id].num_computed += count
            by_id[request_id].num_tokens += request_id in sampled
            self._publish(by_id[request_id])  # the device takes steps in order: who reads comes later
            self._copies.pop(request_id, None)
        for request_id in finished:
            self.abort(request_id)

    def abort(self, request_id: int) -> None:
        """Drops a request, wherever it is, and frees its blocks.

        Raises:
            ValueError: No such request.
        """
        require(request_id in self._known, "request_id", "wait or run", request_id)
        self._known.remove(request_id)
        for request in self._running:
            if request.request_id == request_id:
                self._running.remove(request)
                self._free(request)
                return
        self._waiting = collections.deque(r for r in self._waiting if r.request_id != request_id)

    def abort_all(self) -> None:
        """Drops every request."""
        for request_id in list(self._known):
            self.abort(request_id)

    def forget_prefixes(self) -> None:
        """Nothing that is cached now will be found by requests to come: the weights have changed."""
        self.block_manager.unpublish_all()
        for request in self._running:
            request.is_stale = True

    # --------------------------------------------------------------------------------------- inside
    def _make_room(self, request: _Progress, count: int) -> list[int]:
        """Preempts the latest requests until `request` can have `count` more tokens or is the latest."""
        preempted = []
        manager = self.block_manager
        while manager.blocks_to_append(request.request_id, count) > manager.num_free:
            if self._running[-1] is request:
                break
            victim = self._running.pop()
            self._free(victim)
            victim.num_computed, victim.is_stale = 0, False
            self._waiting.appendleft(victim)
            self.num_preemptions += 1
            preempted.append(victim.request_id)
        return preempted

    def _free(self, request: _Progress) -> None:
        """Gives a request's blocks back; nothing is copied onto them any more."""
        self._publish(request)
        self.block_manager.free(request.request_id)
        self._copies.pop(request.request_id, None)

    def _admissible(self) -> tuple[int, ...] | None:
        """What the oldest waiting request shares; None while blocks for the rest of it are not free."""
        if not self._waiting or len(self._running) == self.max_num_seqs:
            return None
        manager, request = self.block_manager, self._waiting[0]
        found = self._found(request)
        fits = manager.blocks_for(request.num_tokens) - len(found) <= manager.num_free_without(found)
        return found if fits else None

    def _found(self, request: _Progress) -> tuple[int, ...]:
        """Full blocks of a request's beginning that others have computed; its last token is always new."""
        if request.hashes is None:
            return ()
        most = (request.num_tokens - 1) // self.block_manager.block_size
        return self.block_manager.find(request.hashes[:most])

    def _publish(self, request: _Progress) -> None:
        """Lets others find the blocks that are computed and whose tokens the host knows."""
        if request.hashes is None or request.is_stale:
            return
        num_full = min(request.num_computed // self.block_manager.block_size, len(request.hashes))
        for index in range(request.num_published, num_full):
            self.block_manager.publish(request.request_id, index, request.hashes[index])
        request.num_published = num_full

    def _step(self, chunks: list[tuple[_Progress, int]], preempted: list[int]) -> Step:
        is_decode = [count == 1 and request.num_computed > 0 for request, count in chunks]
        # Stable. Decodes are older than prompts, but a prompt's last token alone is laid out as a decode.
        rows = sorted(range(len(chunks)), key=lambda row: not is_decode[row])
        ordered = [chunks[row] for row in rows]
        return Step(
            request_ids=tuple(request.request_id for request, _ in ordered),
            query_lens=tuple(count for _, count in ordered),
            seq_lens=tuple(request.num_computed + count for request, count in ordered),
            block_tables=tuple(self.block_manager.block_table(request.request_id) for request, _ in ordered),
            block_copies=tuple(
                pair for request, _ in ordered for pair in self._copies.get(request.request_id, ())
            ),
            samples=tuple(request.num_new == count for request, count in ordered),
            num_decodes=sum(is_decode),
            preempted=tuple(preempted),
        )
