"""Block-sparse attention: patterns as arrays of blocks, and schedules of the tiles that a mask leaves."""

from jattn.sparsity.schedule import TileSchedule, schedule, tile_classes
