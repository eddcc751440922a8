"""Bounds of a query's products with the keys of each cache block, and the best blocks' least bound."""

from pallas_kernels.block_scores.entry import block_scores as block_scores
from pallas_kernels.block_scores.entry import why_not_scores as why_not_scores
from pallas_kernels.block_scores.threshold import MAX_LEN as MAX_LEN
from pallas_kernels.block_scores.threshold import kth_largest as kth_largest
