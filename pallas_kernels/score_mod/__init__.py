"""Score functions in kernels: which functions kernels can evaluate, and their values on a tile of scores.

A score function is traced once, for a single pair of a query and a key, to a jaxpr of scalars. Kernels
evaluate this jaxpr with one array per variable. A variable that depends on the query alone has one element
per query, and so on: only what depends on both, or on the score, has one element per pair. Sums of such
variables are kept as sums, and constant factors are folded. A lookup at an index per pair is one lookup for a
whole tile if the bounds of the index, from the first and last positions of the tile, are equal.
"""

from pallas_kernels.score_mod.evaluation import KernelScoreMod as KernelScoreMod
from pallas_kernels.score_mod.evaluation import Lookups as Lookups
from pallas_kernels.score_mod.evaluation import NewScores as NewScores
from pallas_kernels.score_mod.evaluation import PairValue as PairValue
from pallas_kernels.score_mod.evaluation import Positions as Positions
from pallas_kernels.score_mod.evaluation import ScoreTile as ScoreTile
from pallas_kernels.score_mod.tracing import ScoreModType as ScoreModType
from pallas_kernels.score_mod.tracing import TableType as TableType
from pallas_kernels.score_mod.tracing import looks_up_each_pair as looks_up_each_pair
from pallas_kernels.score_mod.tracing import why_no_kernel as why_no_kernel
