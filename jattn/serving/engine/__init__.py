"""The engine: scheduler, block manager, runner, sampling and speculative decoding."""
