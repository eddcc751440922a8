"""Code that kernels share: the score function, the paged cache, head dimensions and memory helpers."""

from pallas_kernels.shared.arithmetic import floor_div as floor_div
from pallas_kernels.shared.arithmetic import full_like as full_like
from pallas_kernels.shared.memory import ALIGNED_BYTES as ALIGNED_BYTES
from pallas_kernels.shared.memory import copy_if_unaligned as copy_if_unaligned
from pallas_kernels.shared.score import MAX_CHUNK_SIZE as MAX_CHUNK_SIZE
from pallas_kernels.shared.score import Score as Score
from pallas_kernels.shared.score import normalize_window_side as normalize_window_side
from pallas_kernels.shared.types import Interpret as Interpret
