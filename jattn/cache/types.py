"""Where keys and values are: in blocks of one of three layouts, or one request after the other."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jattn.cache.spec import LAYOUTS, CacheSpec, Stored
from jattn.pytree import pytree, static
from pallas_kernels.checks import require, require_int, require_one_of, require_shape
from pallas_kernels.support import is_concrete

type _Array = Shaped[Array, "..."] | np.ndarray
type _Scale = Float[Array, "..."] | np.ndarray


@pytree
class PagedCache:
    """Keys and values of one layer.

    Attributes:
        k: Keys: NHD [blocks, block_size, kv_heads, head_dim], HND [blocks, kv_heads, block_size, head_dim],
            or packed [blocks, kv_heads, head_dim / x, block_size, x].
        v: Values: as k, but packed [blocks, kv_heads, head_dim, block_size]. May be of another dtype.
        stored_k_scale: key = stored * scale: a scalar, [kv_heads], or [blocks, kv_heads, block_size], so that
            a head's scales of a block are one piece of memory for the kernels; None = 1.
        stored_v_scale: The same for values, or [kv_heads, head_dim].
        layout: "NHD", "HND" or "packed".
    """

    k: _Array
    v: _Array
    stored_k_scale: _Scale | None = dataclasses.field(init=False)
    stored_v_scale: _Scale | None = dataclasses.field(init=False)
    layout: str = static()
    # The constructor's, so that dataclasses.replace hands them over; the properties of these names read them.
    k_scale: dataclasses.InitVar[_Scale | None] = None
    v_scale: dataclasses.InitVar[_Scale | None] = None

    def __init__(
        self,
        *,
        k: _Array,
        v: _Array,
        k_scale: _Scale | None = None,
        v_scale: _Scale | None = None,
        layout: str = "NHD",
    ) -> None:
        """A cache of arrays that exist.

        Args:
            k: As the attribute.
            v: As the attribute.
            k_scale: None, a scalar, [kv_heads], or per token and head [blocks, block_size, kv_heads] in every
                layout.
            v_scale: As k_scale, or per channel [kv_heads, head_dim].
            layout: As the attribute.

        Raises:
            ValueError: Shapes disagree, a scale is of no real numbers, or k or v holds what no scale makes
                numbers of: int8 without a scale, or other integers.
        """
        for name, value in (("k", k), ("v", v), ("layout", layout)):
            object.__setattr__(self, name, value)
        require_one_of("layout", layout, LAYOUTS)
        for name, value, scale in (("k", k, k_scale), ("v", v, v_scale)):
            _check_stored(name, value, scale)
        rank = 5 if layout == "packed" else 4
        require(k.ndim == rank, "k", f"have {rank} axes in the {layout} layout", f"shape {k.shape}")
        require_shape("v", v.shape, self._value_shape(), f"as k {k.shape}, {layout}")
        heads = self.num_kv_heads
        shapes = ((), (heads,), (self.num_blocks, self.block_size, heads))
        for name, scale in (("k", k_scale), ("v", v_scale)):
            if scale is not None:
                scale = _as_scale(f"{name}_scale", scale)
                allowed = (*shapes, (heads, self.head_dim)) if name == "v" else shapes
                require_one_of(f"{name}_scale's shape", tuple(jnp.shape(scale)), allowed)
            object.__setattr__(self, f"stored_{name}_scale", _swap_token_and_head(scale))

    def _value_shape(self) -> tuple[int, ...]:
        if self.layout != "packed":
            return self.k.shape
        blocks, heads, groups, size, x = self.k.shape
        return (blocks, heads, groups * x, size)

    @classmethod
    def create(
        cls, spec: CacheSpec, *, k_scale: _Scale | None = None, v_scale: _Scale | None = None
    ) -> "PagedCache":
        """A cache of zeros.

        Args:
            spec: Its sizes.
            k_scale: The static scale of a quantisation that has one; None = 1, vLLM's default for fp8.
            v_scale: The same of values; one per channel has no default (`jattn.calibrate` makes them).

        Raises:
            ValueError: The quantisation has no static scale, one of another shape, or needs one that is not
                given; a scale is not positive and finite.
        """
        require(isinstance(spec, CacheSpec), "spec", "be a CacheSpec", type(spec).__name__)
        scales = {
            name: _initial_scale(name, spec, stored, scale)
            for name, stored, scale in zip(
                ("k_scale", "v_scale"), spec.stored, (k_scale, v_scale), strict=True
            )
        }
        return cls(
            k=jnp.zeros(spec.key_shape, spec.key_dtype),
            v=jnp.zeros(spec.value_shape, spec.value_dtype),
            **scales,
            layout=spec.layout,
        )

    @classmethod
    def create_on_host(cls, spec: CacheSpec) -> "PagedCache":
        """The same in numpy: a place to swap blocks out to. Static scales stay with the other cache."""
        is_static = lambda stored: stored.scale in ("static", "channel")
        k_scale, v_scale = (
            jnp.ones(stored.scale_shapes(spec)[0]) if is_static(stored) else None for stored in spec.stored
        )
        shapes = jax.eval_shape(lambda: cls.create(spec, k_scale=k_scale, v_scale=v_scale))
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.k.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.k.shape[{"NHD": 1, "HND": 2, "packed": 3}[self.layout]]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.k.shape[2 if self.layout == "NHD" else 1]

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.v.shape[2] if self.layout == "packed" else self.v.shape[3]

    @property  # type: ignore[misc]
    def k_scale(self) -> Any:  # noqa: F811
        """The keys' scale as the constructor takes it."""
        return _swap_token_and_head(self.stored_k_scale)

    @property  # type: ignore[misc]
    def v_scale(self) -> Any:  # noqa: F811
        """The values' scale as the constructor takes it."""
        return _swap_token_and_head(self.stored_v_scale)


def _check_stored(name: str, array: Any, scale: Any) -> None:
    """Keys or values must be an array of floats, or int8 with a scale."""
    require(hasattr(array, "dtype") and hasattr(array, "ndim"), name, "be an array", type(array).__name__)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return
    rule = "hold floats or int8 (vLLM's uint8: view it as the 8-bit float that it holds)"
    require(array.dtype == jnp.int8, name, rule, array.dtype)
    require(scale is not None, f"{name}_scale", f"be given for {name} of int8", None)


def _as_scale(name: str, scale: Any) -> Any:
    """A scale, of a list an array. It must be real: bools would count as 1, imaginary parts be dropped."""
    scale = np.asarray(scale) if isinstance(scale, list | tuple) else scale
    dtype = getattr(scale, "dtype", None)
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    is_array = dtype is not None and any(jnp.issubdtype(dtype, real) for real in (jnp.floating, jnp.integer))
    got = type(scale).__name__ if dtype is None else dtype
    require(is_number or is_array, name, "be an array of real numbers or one such number", got)
    return scale


def _initial_scale(name: str, spec: CacheSpec, stored: Stored, scale: _Scale | None) -> _Scale | None:
    """What a new cache holds for `k_scale` or `v_scale`."""
    shapes, kind = stored.scale_shapes(spec), f"with quantization={spec.quantization!r}"
    if scale is None:
        way_out = "jattn.calibrate makes it; 'int8_k_only' and 'int8_token_head' need none"
        require(stored.scale != "channel", name, f"be given {kind} ({way_out})", None)
        return jnp.ones(shapes[0], jnp.float32) if shapes else None
    require(stored.scale in ("static", "channel"), name, f"be None {kind}", "a static scale")
    scale = _as_scale(name, scale)
    require_one_of(f"{name}'s shape {kind}", tuple(jnp.shape(scale)), shapes)
    if not isinstance(scale, jax.core.Tracer):
        values = np.asarray(scale, np.float32)
        is_right = bool((np.isfinite(values) & (values > 0)).all())
        require(is_right, name, "be positive and finite", scale)
    return jnp.array(scale, jnp.float32)  # a copy: who donates the cache donates it, too


def _swap_token_and_head(scale: Any) -> Any:
    """Scales per token and head from the constructor's order to the stored one, or back."""
    if not has_token_axis(scale):
        return scale
    return np.swapaxes(scale, 1, 2) if isinstance(scale, np.ndarray) else jnp.swapaxes(scale, 1, 2)


def has_token_axis(scale: Any) -> bool:
    """Whether a stored scale is one per token and head, made when written; the others are static."""
    return scale is not None and jnp.ndim(scale) == 3


@pytree
class PackedKV:
    """Keys and values that are not in a cache: those of every request one after the other.

    For encoders, cross attention, and prompts attended to as they are. Stands in for a PagedCache in attend.

    Attributes:
        k: [kv_tokens, kv_heads, head_dim]
        v: [kv_tokens, kv_heads, head_dim]
        kv_start_loc: First key of each row of the metadata; row r has `seq_lens[r]` keys from there. `attend`
            refuses rows that have keys outside of k; inside jit nobody can see them.
        is_in_order: Static: whoever made it says that kv_start_loc begins with 0 and ascends, padding rows'
            too, and that no two rows share a key. The kernels compute gradients only then. `attend` refuses
            what is not so; inside jit nobody can see it.
        max_seq_len: Static: no row has more keys; None = they may all be one row's. Under a mask the kernels
            list tiles of so many keys for each row.
    """

    k: Float[Array, "kv_tokens kv_heads head_dim"]
    v: Float[Array, "kv_tokens kv_heads head_dim"]
    kv_start_loc: Int[Array, " reqs"]
    is_in_order: bool = static(default=False)
    max_seq_len: int | None = static(default=None)

    def __post_init__(self) -> None:
        if self.max_seq_len is not None:
            require_int(max_seq_len=self.max_seq_len)
            require(self.max_seq_len >= 0, "max_seq_len", "be >= 0", self.max_seq_len)
        for name, axes in (("k", 3), ("v", 3), ("kv_start_loc", 1)):
            array: Any = getattr(self, name)
            require(hasattr(array, "dtype") and hasattr(array, "ndim"), name, "be an array", repr(array))
            require(array.ndim == axes, name, f"have {axes} axes", f"shape {array.shape}")
            kind, what = (jnp.integer, "ints") if name == "kv_start_loc" else (jnp.floating, "floats")
            require(jnp.issubdtype(array.dtype, kind), name, f"hold {what}", array.dtype)
        require_shape("v", self.v.shape, self.k.shape, "as k")

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.k.shape[2]

    @property
    def max_keys_per_row(self) -> int:
        """Static: what no row exceeds, said or not."""
        num_keys = self.k.shape[0]
        return num_keys if self.max_seq_len is None else min(self.max_seq_len, num_keys)

    def check_rows(self, seq_lens: Any, query_lens: Any = None) -> None:
        """That each row's keys are among these, and are what the static fields say; where nothing is traced.

        Args:
            seq_lens: Keys of each row.
            query_lens: Its queries: where there are none, no key is read. None = all rows have some.

        Raises:
            ValueError: A row has more keys than max_seq_len, or some outside of k, or is not in order.
        """
        if not is_concrete(seq_lens):
            return
        lens, num_keys = np.asarray(seq_lens, np.int64), self.k.shape[0]
        longest = int(np.max(lens, initial=0))
        if self.max_seq_len is not None:
            rule = f"be at least the longest row ({longest} keys)"
            require(longest <= self.max_seq_len, "cache.max_seq_len", rule, self.max_seq_len)
        if not is_concrete(self.kv_start_loc, query_lens):
            return
        firsts = np.asarray(self.kv_start_loc, np.int64)
        is_read = (lens > 0) if query_lens is None else (lens > 0) & (np.asarray(query_lens) > 0)
        for r in np.flatnonzero(is_read & ((firsts < 0) | (firsts + lens > num_keys)))[:1]:
            rule = f"leave row {r}'s {lens[r]} keys within k's {num_keys}"
            require(False, f"cache.kv_start_loc[{r}]", rule, firsts[r])
        if self.is_in_order and len(firsts):
            require(int(firsts[0]) == 0, "cache.kv_start_loc[0]", "be 0 with is_in_order", firsts[0])
            for r in np.flatnonzero(firsts[1:] < (firsts + lens)[:-1])[:1] + 1:
                rule = f"be at least {firsts[r - 1] + lens[r - 1]}, where row {r - 1} ends, with is_in_order"
                require(False, f"cache.kv_start_loc[{r}]", rule, firsts[r])


def require_not_deleted(cache: PagedCache) -> None:
    """No array of a cache may have been given up to a call that it was donated to.

    Raises:
        ValueError: One was.
    """
    own = (array for array in (cache.k, cache.v) if isinstance(array, jax.Array) and is_concrete(array))
    rule = "be what write_kv, or the jit that it was donated to, returned in its place"
    require(not any(array.is_deleted() for array in own), "cache", rule, "one that was given up")


def require_distinct_arrays(*caches: PagedCache) -> None:
    """No array may stand at two places of what is donated: its memory cannot be given up twice.

    Raises:
        ValueError: One does, or was given up before; inside jit nothing is donated and nobody minds.
    """
    for cache in caches:
        require_not_deleted(cache)
    every = (array for cache in caches for array in block_arrays(cache).values())
    arrays = [array for array in every if isinstance(array, jax.Array) and is_concrete(array)]
    rule = "have arrays of their own for keys and values, which are donated (jnp.copy makes one)"
    is_own = len({id(array) for array in arrays}) == len(arrays)
    require(is_own, "caches", rule, "one array at two places")


def block_arrays(cache: PagedCache) -> dict[str, Any]:
    """The arrays whose first axis is the block, by their attribute's name: what moves when a block moves."""
    scales = {"stored_k_scale": cache.stored_k_scale, "stored_v_scale": cache.stored_v_scale}
    return {"k": cache.k, "v": cache.v} | {name: s for name, s in scales.items() if has_token_axis(s)}
