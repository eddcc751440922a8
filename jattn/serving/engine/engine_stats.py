"""An engine's counts, gathered from its parts."""

from jattn.serving.engine.engine_core import EngineCore
from jattn.serving.engine.runner import Runner
from jattn.serving.engine.scheduler import Scheduler
from jattn.serving.engine.speculation import Speculation
from jattn.serving.engine.stats import EngineStats


def stats_of(
    scheduler: Scheduler, core: EngineCore, runner: Runner, drafts: Speculation | None
) -> EngineStats:
    """Now, and since the engine was made; no drafts = none are made."""
    manager = scheduler.block_manager
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_steps=runner.num_steps,
        num_cascade_steps=runner.num_cascade_steps,
        num_failed_steps=core.num_failed_steps,
        num_compiles=runner.num_compiles,
        num_preemptions=scheduler.num_preemptions,
        num_blocks=manager.capacity,
        num_used_blocks=manager.num_used,
        peak_blocks=manager.peak_used,
        num_prefix_tokens=scheduler.num_prefix_tokens,
        num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
        num_forked_tokens=scheduler.num_forked_tokens,
        num_generated_tokens=core.num_generated,
        num_drafts=0 if drafts is None else drafts.num_drafts,
        num_draft_tokens=0 if drafts is None else drafts.num_draft_tokens,
        num_accepted_tokens=0 if drafts is None else drafts.num_accepted_tokens,
        time_to_first_token=core.first_times,
        inter_token_latency=core.times,
        queue_time=core.queue_times,
        prefill_time=core.prefill_times,
        step_tokens=core.step_tokens,
    )
