"""Errors of the kernels' entry points for arguments that are not arrays or have other axes."""

import jax.numpy as jnp
import pytest

from pallas_kernels.list_tiles import list_tiles
from tests.pallas_kernels.entry_points import ENTRIES

OPTIONAL = {
    "paged_decode": ("k_scale", "v_scale", "sinks", "alibi_slopes"),
    "varlen_prefill": ("k_scale", "v_scale", "sinks", "alibi_slopes"),
    "varlen_backward": ("grad_lse", "alibi_slopes"),
    "cache_write": ("k_scale", "v_scale"),
    "qkv_write": ("cos", "sin", "q_norm", "k_norm"),
}


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("name", ENTRIES)
def test_non_arrays_and_arrays_with_other_axes_are_rejected_by_name(name):
    entry = ENTRIES[name]
    arguments = entry.floats | entry.ints
    for argument, array in arguments.items():
        for wrong_array in (array[None], array[0]):
            axes = r"have (shape \(.*\)|\d axes)"
            with pytest.raises(ValueError, match=rf"^{argument} must {axes}.*, got \("):
                entry.run(**arguments | {argument: wrong_array}, **entry.static)
        with pytest.raises(ValueError, match=f"^{argument} must be an array, got list"):
            entry.run(**arguments | {argument: array.tolist()}, **entry.static)
    for argument in OPTIONAL.get(name, ()):
        with pytest.raises(ValueError, match=f"^{argument} must be an array, got float"):
            entry.run(**arguments | {argument: 0.5}, **entry.static)


@pytest.mark.usefixtures("types_unchecked")
def test_codes_with_other_axes_are_rejected_by_name():
    with pytest.raises(ValueError, match=r"codes must have 2 axes, got \(3,\)"):
        list_tiles(jnp.zeros(3, jnp.uint8))
