"""The page on training states which pass runs on a kernel; each row of its table is traced as on a GPU."""

import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn import masks
from tests.dense.test_training import as_on_a_gpu
from tests.score_functions import relative

pytestmark = pytest.mark.kernels

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "training.md"
ROW = r"^\| .*?`(.+)` \| (q, k, v.*?) \| (kernel|XLA) \| (kernel|XLA) \|$"
ROWS = re.findall(ROW, PAGE.read_text(), flags=re.MULTILINE)
TOKENS = 256
TABLE = jnp.ones((4, 33))
NAMES = vars(masks) | {
    "jnp": jnp,
    "ids": jnp.arange(TOKENS) // 100,
    "bounds": jnp.asarray([0, 100, 200, TOKENS]),
    "blocks": jnp.ones((4, TOKENS, TOKENS), bool),
    "columns": jnp.zeros((4, 3), jnp.int32),
    "slashes": jnp.zeros((4, 3), jnp.int32),
    "ScoreMod": jattn.ScoreMod,
    "relative_bias": relative,
}


def options_of(code, arguments):
    """Return the options in a row's code, in which `|` is escaped with a backslash."""
    return eval(f"dict({code.replace(chr(92), '')})", NAMES | arguments)


@pytest.fixture
def empty_kernels(monkeypatch):
    """Make kernels without instructions, because tracing them takes most of the time."""
    kernel = plgpu.kernel
    monkeypatch.setattr(plgpu, "kernel", lambda body, *args, **options: kernel(do_nothing, *args, **options))


def do_nothing(*refs, **scratch):
    """Return at once: the body of a kernel."""


def test_support_table_is_parsed():
    assert len(ROWS) >= 20
    assert {(forward, backward) for *_, forward, backward in ROWS} == {
        ("kernel", "kernel"),
        ("kernel", "XLA"),
        ("XLA", "XLA"),
    }


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(("code", "trained", "forward", "backward"), ROWS, ids=lambda text: text[:60])
def test_row_names_the_implementations_that_are_used(code, trained, forward, backward):
    def loss(trained, fixed):
        arguments = fixed | trained
        options = options_of(code, arguments)
        for name in ("head_dim", "dtype"):
            options.pop(name, None)
        out = jattn.attention(arguments["q"], arguments["k"], arguments["v"], **options)
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(out))

    sizes = options_of(code, dict.fromkeys(("sinks", "slopes")) | {"table": TABLE})
    shape, dtype = (TOKENS, 2, sizes.get("head_dim", 64)), sizes.get("dtype", jnp.bfloat16)
    arrays = {name: jnp.ones(shape, dtype) for name in "kv"} | {"q": jnp.ones((TOKENS, 4, shape[-1]), dtype)}
    arrays |= {"sinks": jnp.ones(4), "slopes": jnp.ones(4), "table": TABLE}
    names = trained.split(", ")
    split = {name: arrays.pop(name) for name in names}
    with as_on_a_gpu() as called, warnings.catch_warnings():
        warnings.simplefilter("ignore", jattn.KernelFallbackWarning)
        jax.eval_shape(jax.grad(loss), split, arrays)
    served = {"kernel": {"attend"}, "XLA": set()}[forward] | {"kernel": {"gradients"}, "XLA": set()}[backward]
    assert set(called) == served
