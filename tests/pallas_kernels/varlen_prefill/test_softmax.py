"""Running-max policies of varlen_prefill's softmax: their selection and their results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.memory import head_chunks
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.varlen_prefill import softmax
from pallas_kernels.varlen_prefill.sizes import LIST_TABLE, TABLE, PrefillSizes
from pallas_kernels.varlen_prefill.spec import REGISTERS, PrefillShape, PrefillSpec

INVARIANT = PrefillSizes(tile_kv=64, batch_invariant=True)


def spec_of(
    *, dtype="bfloat16", tile_kv=64, soft_cap=None, has_alibi=False, interpret=None, window=None, **fields
):
    shape = PrefillShape(
        q_heads=2,
        group=1,
        head=head_chunks(64),
        cache_tiling=None,
        has_aligned_keys=False,
        heads_per_l2_group=2,
    )
    fields = {"sizes": PrefillSizes(tile_kv=tile_kv), "has_lists": False, "shape": shape} | fields
    score = Score(scale=1.0, soft_cap=soft_cap, window=window or (None, None))
    call = {"has_alibi": has_alibi, "returns_lse": True, "interpret": interpret}
    return PrefillSpec(score=score, dtype=jnp.dtype(dtype), **fields, **call)


@pytest.mark.parametrize(
    ("changes", "policy", "headroom"),
    [
        ({}, softmax.LazyRescale, 80.0),
        ({"dtype": "float16"}, softmax.LazyRescale, 4.0),
        ({"interpret": plgpu.InterpretGPUParams()}, softmax.LazyRescale, 80.0),
        ({"has_alibi": True}, softmax.LazyRescale, 100.0),
        ({"has_alibi": True, "dtype": "float16"}, softmax.RunningRowMax, None),
        ({"has_alibi": True, "tile_kv": 128}, softmax.RunningRowMax, None),
        ({"soft_cap": 30.0}, softmax.NoRowMax, None),
        ({"soft_cap": 30.0, "dtype": "float16"}, softmax.LazyRescale, 4.0),
        ({"soft_cap": 30.0, "has_alibi": True}, softmax.LazyRescale, 100.0),
        ({"sizes": INVARIANT}, softmax.LazyRescale, 80.0),  # each row sees the first keys
        ({"sizes": INVARIANT, "window": (9, 0)}, softmax.RunningRowMax, None),
        ({"sizes": INVARIANT, "has_lists": True}, softmax.RunningRowMax, None),
        ({"sizes": INVARIANT, "has_lists": True, "soft_cap": 30.0}, softmax.NoRowMax, None),
    ],
    ids=str,
)
def test_scores_determine_the_row_max_policy(changes, policy, headroom):
    actual = softmax.choose_row_max_policy(spec_of(**changes))
    assert type(actual) is policy
    assert getattr(actual, "headroom", None) == headroom
    assert isinstance(actual, softmax.RowMaxPolicy)


class TestSums:
    @pytest.fixture(autouse=True)
    def _without_layouts(self, monkeypatch):
        """Disable layout casts, which are meaningless outside of a kernel."""
        monkeypatch.setattr(plgpu, "layout_cast", lambda x, layout: x)

    @pytest.mark.parametrize(
        ("policy", "has_row_term"),
        [
            (softmax.NoRowMax, False),
            (softmax.NoRowMax, True),
            (softmax.RunningRowMax, False),
            (softmax.RunningRowMax, True),
            (softmax.LazyRescale, False),
            (softmax.LazyRescale, True),
        ],
    )
    def test_every_policy_computes_the_softmax(self, policy, has_row_term):
        """Over four tiles of scores that rise and fall; the first tile is masked out for some rows."""
        rng = np.random.default_rng(0)
        tiles_of_s = rng.standard_normal((4, 64, 64)).astype(np.float32) * 3
        term = jnp.asarray(rng.standard_normal(64), jnp.float32) if has_row_term else None
        rise = np.asarray([0.0, 30.0, -20.0, 45.0]) if policy is not softmax.NoRowMax else np.zeros(4)
        tiles_of_s = tiles_of_s + rise.astype(np.float32)[:, None, None]
        is_seen = np.ones((4, 64, 64), bool)
        is_seen[0, :7] = False
        headroom = () if policy is not softmax.LazyRescale else (8.0,)
        policy = policy(spec_of(interpret=plgpu.InterpretGPUParams()), *headroom)
        scaling = softmax.Scaling(LOG2E, term)
        row_max, row_sum = softmax.full_rows(64, policy.initial_row_max), jnp.zeros((64, 64), jnp.float32)
        for i, (s, seen) in enumerate(zip(tiles_of_s, is_seen, strict=True)):
            s = policy.prescale(jnp.asarray(s), scaling, row_max, is_first=i == 0)
            s = jnp.where(seen, s, -jnp.inf)
            exponent, row_max, alpha, needs_rescale = policy.shift_scores(
                s, scaling, row_max, is_first=i == 0
            )
            if i:
                (row_sum,) = policy.rescale(alpha, needs_rescale, (row_sum,))
            row_sum = row_sum + jnp.exp2(exponent)
        s = np.where(is_seen, tiles_of_s.astype(np.float64) * LOG2E, -np.inf)
        if has_row_term:
            s = s + np.asarray(term, np.float64)[None, :, None]
        expected = np.log2(np.exp2(s - s.max()).sum(axis=(0, 2))) + s.max()
        np.testing.assert_allclose(np.log2(row_sum.sum(axis=1)) + row_max, expected, rtol=1e-5)

    @pytest.mark.parametrize("policy", [softmax.RunningRowMax, softmax.NoRowMax])
    def test_masked_out_leading_tiles_do_not_change_the_bits(self, policy):
        """Each variant is one program, in which the compiler may fuse a product and a difference."""
        s = jnp.asarray(np.random.default_rng(1).standard_normal((64, 64)) * 3, jnp.float32)
        policy, scaling = policy(spec_of(sizes=INVARIANT, window=(9, 0))), softmax.Scaling(LOG2E)

        def shift(s, row_max, *, is_first, is_hidden=False):
            s = policy.prescale(s, scaling, row_max, is_first=is_first)
            s = jnp.full_like(s, -jnp.inf) if is_hidden else s
            return policy.shift_scores(s, scaling, row_max, is_first=is_first)[:2]

        @jax.jit
        def first_tile(s):
            exponent, row_max = shift(s, softmax.full_rows(64, policy.initial_row_max), is_first=True)
            return jnp.exp2(exponent), row_max

        @jax.jit
        def second_tile(s):
            row_max = softmax.full_rows(64, policy.initial_row_max)
            _, row_max = shift(s + 1, row_max, is_first=True, is_hidden=True)
            exponent, row_max = shift(s, row_max, is_first=False)
            return jnp.exp2(exponent), row_max

        for actual, expected in zip(second_tile(s), first_tile(s), strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("table", [TABLE, LIST_TABLE], ids=["items", "lists"])
@pytest.mark.parametrize("heads_per_l2_group", [1, 2])
def test_register_requests_fit_the_register_file(table, heads_per_l2_group):
    for width, sizes in table.items():
        shape = PrefillShape(
            q_heads=2,
            group=1,
            head=head_chunks(width),
            cache_tiling=None,
            has_aligned_keys=False,
            heads_per_l2_group=heads_per_l2_group,
        )
        spec = spec_of(shape=shape, sizes=sizes, has_lists=table is LIST_TABLE)
        load, compute = spec.load_registers, spec.compute_registers
        assert (load + sizes.warpgroups * compute) * 128 <= REGISTERS
        assert load % 8 == 0
        assert compute % 8 == 0
