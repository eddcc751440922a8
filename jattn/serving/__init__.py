"""Serving: which requests run, where their keys and values are, what the next token is."""

from jattn.serving.block_manager import BlockManager
from jattn.serving.scheduler import Scheduler, Step

__all__ = ["BlockManager", "Scheduler", "Step"]
