"""Matrix products of tiles of rows with one of many matrices per tile, as in mixture-of-experts layers."""

from pallas_kernels.grouped_matmul.entry import grouped_matmul as grouped_matmul
from pallas_kernels.grouped_matmul.kernel import TILE_ROWS as TILE_ROWS
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference as grouped_matmul_reference
