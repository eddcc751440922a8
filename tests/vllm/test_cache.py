import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests.cache.test_cache import random_kv, spec


def test_reshape_and_cache_is_write_kv_over_the_packed_arrays():
    cache = jattn.PagedCache.create(spec(layout="packed"))
    key, value = random_kv(3)
    slots = jnp.asarray([3, -1, 9])
    want = jattn.write_kv(jattn.PagedCache.create(spec(layout="packed")), key, value, slots)
    k, v = jattn.vllm.reshape_and_cache(key, value, cache.k, cache.v, slots)
    np.testing.assert_array_equal(k, want.k)
    np.testing.assert_array_equal(v, want.v)


@pytest.mark.parametrize("of", [float, jnp.asarray, lambda scale: jnp.asarray([scale])])
def test_reshape_and_cache_divides_by_the_scales(of):
    shapes = spec(layout="packed", dtype=jnp.float8_e4m3fn)
    cache = jattn.PagedCache.create(shapes)
    ones = jnp.ones((1, 2, 16))
    k, v = jattn.vllm.reshape_and_cache(
        ones, ones, cache.k, cache.v, jnp.asarray([0]), k_scale=of(0.5), v_scale=of(0.25)
    )
    assert float(k[0, 0, 0, 0, 0]) == 2
    assert float(v[0, 0, 0, 0]) == 4
