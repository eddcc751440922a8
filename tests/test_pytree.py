"""@pytree validates objects that users construct, and skips validation when JAX rebuilds them."""

import jax
import jax.numpy as jnp
import pytest

from jattn.pytree import pytree, replace, static


@pytree
class Pair:
    left: jax.Array
    right: jax.Array
    name: str = static(default="pair")

    def __post_init__(self):
        if self.left.shape != self.right.shape:
            raise ValueError(f"right must have shape {self.left.shape}, got {self.right.shape}.")


def pair(n=2, **kwargs):
    return Pair(left=jnp.zeros(n), right=jnp.ones(n), **kwargs)


def test_constructor_validates():
    with pytest.raises(ValueError, match=r"right must have shape \(2,\), got \(3,\)"):
        Pair(left=jnp.zeros(2), right=jnp.zeros(3))
    with pytest.raises(TypeError, match="positional"):
        Pair(jnp.zeros(2), jnp.zeros(2))
    with pytest.raises(AttributeError, match="cannot assign"):
        pair().left = None


def test_unflattening_does_not_validate():
    odd = jax.tree.map(lambda x: x.sum() if x[0] == 0 else x, pair())
    assert odd.left.shape == ()
    assert jax.eval_shape(lambda p: p, pair()).left.shape == (2,)
    assert jax.tree.structure(pair()) == jax.tree.structure(pair(3))


def test_static_fields_are_part_of_the_structure():
    traces = []

    @jax.jit
    def f(p):
        traces.append(p.name)
        return p.left + p.right

    for name in ("a", "a", "b"):
        f(pair(name=name))
    assert traces == ["a", "b"]
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(pair())] == [
        ".left",
        ".right",
    ]


def test_replace_keeps_other_fields():
    changed = replace(pair(name="x"), left=jnp.zeros(7))
    assert (changed.left.shape, changed.right.shape, changed.name) == ((7,), (2,), "x")
