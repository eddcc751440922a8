"""Score functions: elementwise functions that change attention scores before the softmax."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jattn.pytree import lift_function
from pallas_kernels.checks import require
from pallas_kernels.score_mod import KernelScoreMod, ScoreModType, TableType

type ScoreFunction = Callable[..., Any]


@jax.tree_util.register_pytree_node_class
class ScoreMod:
    """A score function and the arrays it looks up, `f(score, batch, head, q_idx, kv_idx, *arrays)`.

    The function gets scalars and returns the new score: it is traced once and applied to every pair of a
    query and a key, as in FlexAttention. It is hashed by identity, so define it once and not per call. Arrays
    that change from call to call must be arguments: those that the function captures are constants of the
    compiled code, which keeps their values if the captured variable is assigned again.

    Attributes:
        function: Function of the scaled score, after the soft cap and the ALiBi bias of the layer; the row of
            the batch (metadata row, batch element or document), the query head, and the positions of query
            and key in their sequence, all int32; and the arrays.
        arrays: Arrays that the function looks up. Attention has gradients for those of float dtype.
        first_row: Row of the batch that row 0 of the attended region is.

    Source: FlexAttention's `score_mod`, whose captured tensors are arguments here.
    """

    def __init__(self, function: ScoreFunction, *arrays: Array | np.ndarray) -> None:
        """Bind arrays to a score function.

        Raises:
            ValueError: If it is not a function of five arguments and one more per array.
        """
        require(callable(function), "score_mod", "be a function", repr(function))
        try:
            signature = inspect.signature(function)
        except ValueError:  # Some builtin functions have no signature.
            signature = None
        if signature is not None:
            try:
                signature.bind(*[None] * (5 + len(arrays)))
            except TypeError:
                arguments = "score, batch, head, q_idx and kv_idx"
                raise ValueError(
                    f"score_mod must take {arguments}, and {len(arrays)} arrays, got signature {signature}. "
                    "Pass arrays as jattn.ScoreMod(function, *arrays)."
                ) from None
        self.function, self.arrays, self.first_row = function, arrays, 0

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[ScoreFunction, int]]:
        """Flatten to the arrays (JAX protocol)."""
        return self.arrays, (self.function, self.first_row)

    @classmethod
    def tree_unflatten(cls, structure: tuple[ScoreFunction, int], arrays: Any) -> "ScoreMod":
        """Rebuild from the arrays (JAX protocol)."""
        mod = object.__new__(cls)
        mod.arrays, (mod.function, mod.first_row) = tuple(arrays), structure
        return mod

    def from_row(self, first_row: int) -> "ScoreMod":
        """Return the score function of a region whose row 0 is `first_row` of the batch."""
        return self.tree_unflatten((self.function, self.first_row + first_row), self.arrays)

    @property
    def static_part(self) -> ScoreModType:
        """The function and the types of its arrays, which decide whether kernels can evaluate it."""
        types = (TableType(jnp.shape(x), jnp.dtype(jnp.result_type(x))) for x in self.arrays)
        return ScoreModType(self.function, tuple(types))

    def for_kernels(self) -> KernelScoreMod:
        """Return the score function as the kernels take it."""
        return KernelScoreMod.of(self.static_part, self.arrays, self.first_row)

    @property
    def float_arrays(self) -> tuple[Array, ...]:
        """The arrays that have gradients."""
        return tuple(jnp.asarray(x) for x in self.arrays if jnp.issubdtype(x.dtype, jnp.inexact))

    @property
    def other_arrays(self) -> tuple[Any, ...]:
        """The arrays without gradients."""
        return tuple(x for x in self.arrays if not jnp.issubdtype(x.dtype, jnp.inexact))

    def with_arrays(self, float_arrays: Iterable[Any], other_arrays: Iterable[Any]) -> "ScoreMod":
        """Return the score function with new arrays, given those of float dtype and the rest apart."""
        floats, others = iter(float_arrays), iter(other_arrays)
        arrays = [
            next(floats if jnp.issubdtype(array.dtype, jnp.inexact) else others) for array in self.arrays
        ]
        return self.tree_unflatten((self.function, self.first_row), arrays)

    def limit_queries(self, num_queries: int) -> "ScoreMod":
        """Return the score function with later queries at the position of query `num_queries - 1`.

        A function may be infinite or NaN for the queries that pad a sequence, and its derivative there, which
        is multiplied by 0, must not be.
        """
        return self.tree_unflatten((_LimitedQueries(self.function, num_queries), self.first_row), self.arrays)

    def lift_captured_arrays(self, score_dtype: Any) -> "ScoreMod":
        """Return the score function with the traced arrays that it captures as arrays; see `lift_function`.

        Args:
            score_dtype: Dtype of the scores.
        """
        scalars = [jax.ShapeDtypeStruct((), dtype) for dtype in (score_dtype, *[jnp.int32] * 4)]
        function, captured = lift_function(self.function, [*scalars, *self.arrays])
        return self.tree_unflatten((function, self.first_row), (*self.arrays, *captured))

    def __call__(
        self, scores: Float[Array, "..."], row: Any, head: Any, query: Any, key: Any
    ) -> Float[Array, "..."]:
        """Return the new scores; the other arguments broadcast against the scores.

        Raises:
            ValueError: If the function does not return a scalar of float dtype.
        """

        def scalar(score: Array, batch: Array, *pair: Array) -> Array:
            result = jnp.asarray(self.function(score, batch, *pair, *self.arrays))
            is_score = result.shape == () and jnp.issubdtype(result.dtype, jnp.floating)
            shape = f"{result.dtype}{list(result.shape)}"
            require(is_score, "score_mod", "return a scalar of float dtype", shape)
            return result.astype(score.dtype)

        batch = row + jnp.int32(self.first_row)
        modified: Array = jnp.vectorize(scalar)(scores, batch, head, query, key)
        return modified


@dataclasses.dataclass(frozen=True)
class _LimitedQueries:
    """A score function with query positions of at most `num_queries - 1`."""

    function: ScoreFunction
    num_queries: int

    @property
    def __name__(self) -> str:
        """Name of the function, for messages."""
        return str(getattr(self.function, "__name__", self.function))

    def __call__(self, score: Any, batch: Any, head: Any, query: Any, *key_and_arrays: Any) -> Any:
        """Return the new score."""
        query = jnp.minimum(query, self.num_queries - 1)
        return self.function(score, batch, head, query, *key_and_arrays)


def as_score_mod(score_mod: ScoreMod | ScoreFunction | None) -> ScoreMod | None:
    """Return a function as a ScoreMod without arrays."""
    return score_mod if isinstance(score_mod, ScoreMod | None) else ScoreMod(score_mod)


def visible_pairs(
    visible: Bool[Array, "..."], row: Any, head: Any, query: Any, key: Any
) -> tuple[Array, Array, Array, Array]:
    """Return the arguments of a score function with every invisible pair replaced by a visible one, if any.

    A function may be infinite or NaN for pairs that nobody sees, and its derivative there, which is
    multiplied by 0, must not be.
    """
    index = jnp.argmax(visible.reshape(-1))

    def keep_visible(argument: Any) -> Array:
        full = jnp.broadcast_to(argument, visible.shape)
        return jnp.where(visible, full, full.reshape(-1)[index])

    return keep_visible(row), keep_visible(head), keep_visible(query), keep_visible(key)
