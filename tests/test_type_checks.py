"""The import hook's wrappers reject arguments that do not match their annotations."""

import typing

import beartype.roar
import jax.numpy as jnp
import jaxtyping
import pytest

from jattn.batch.bucket import Bucket
from jattn.cache.quantization import saturate
from pallas_kernels.checks import require_positive
from tests.type_checks import is_for_jaxtyping

FLOATS, INTS = jaxtyping.Float[jaxtyping.Array, "..."], jaxtyping.Int32[jaxtyping.Array, "..."]


@pytest.mark.parametrize(("annotation", "is_shape_annotation"), [
    (int, False),
    (list[int] | None, False),
    (FLOATS, True),
    (dict[str, tuple[INTS, ...]] | None, True),
    ("Later", True),
    (typing.Optional["Later"], True),  # noqa: F821 (a name that is nowhere)
])  # fmt: skip
def test_shapes_and_names_are_found_in_annotations(annotation, is_shape_annotation):
    assert is_for_jaxtyping(annotation) == is_shape_annotation


def test_shapes_are_checked():
    assert saturate(jnp.ones((2, 4)), jnp.float32).shape == (2, 4)
    for values in (jnp.ones(4, jnp.int32), [1.0]):
        with pytest.raises(jaxtyping.TypeCheckError, match="values"):
            saturate(values, jnp.float32)


@pytest.mark.parametrize("call", [lambda: require_positive(x="1"), lambda: Bucket(max_decodes=1.5)])
def test_types_are_checked_of_functions_and_dataclass_constructors(call):
    with pytest.raises(beartype.roar.BeartypeCallHintParamViolation):
        call()


def test_types_unchecked_disables_both_checks(types_unchecked):
    with pytest.raises(ValueError, match="max_decodes must be"):
        Bucket(max_decodes=1.5)
    assert saturate(jnp.ones(3), jnp.float32).shape == (3,)
