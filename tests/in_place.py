"""Whether a step writes into the cache that it is given, or copies it."""

import re

import jattn


def check_in_place(step, cache_spec, arguments):
    """A jitted step must alias its cache, hold no copy of it, and leave the caller's arrays deleted.

    Args:
        step: Returns the cache among its results.
        cache_spec: Of the cache.
        arguments: From a cache to the step's arguments.
    """
    cache = jattn.PagedCache.create(cache_spec)
    compiled = step.lower(*arguments(cache)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_spec.num_bytes
    assert "input_output_alias" in compiled.as_text()
    assert copies_of(compiled, cache.k) == []
    step(*arguments(cache))
    assert cache.k.is_deleted()
    assert cache.v.is_deleted()


def copies_of(compiled, array):
    """Instructions of the compiled program that copy something of the array's shape."""
    shape = ",".join(map(str, array.shape))
    return re.findall(rf"\S+ = \w+\[{shape}\]\S* copy\(.*", compiled.as_text())
