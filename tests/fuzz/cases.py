"""Kinds of cases: each is drawn from a seed, and judged."""

import pathlib
import time
import traceback

import jax

from tests.fuzz import attention, dense, gradients, moves
from tests.fuzz.draw import draw as draw_attention

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
ROOT = pathlib.Path(__file__).parents[2]
IMPLEMENTATIONS = ("mosaic_gpu", "xla", "reference")
KINDS = (*IMPLEMENTATIONS, "gradients", "dense", "moves")


def draw(kind: str, seed: int, *, is_large: bool = False) -> dict:
    """The case of a seed: a dict of literals."""
    if kind == "moves":
        return moves.draw(seed)
    if kind == "dense":
        return dense.draw(seed)
    if kind == "gradients":
        return gradients.draw(seed)
    return draw_attention(kind, seed, is_large=is_large)


def check(kind: str, case: dict) -> None:
    """Raises AssertionError for a wrong answer, or whatever the library raises."""
    own = {"moves": moves.check, "gradients": gradients.check, "dense": dense.check}
    own.get(kind, attention.check)(case)


def outcome_of(kind: str, seed: int, *, is_large: bool = False) -> dict:
    """How a case ends.

    "passed"; "refused" by name; "blamed": a ValueError of the library's says that the caller is wrong, though
    all that is drawn is right; "wrong"; or "crashed" by any other error.
    """
    case, start = draw(kind, seed, is_large=is_large), time.monotonic()
    outcome, detail = "passed", ""
    try:
        check(kind, case)
    except Exception as error:
        outcome, detail = kind_of(error), f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - start, 2)
    return {
        "kind": kind,
        "seed": seed,
        "outcome": outcome,
        "detail": detail[:500],
        "seconds": seconds,
        "case": case,
    }


def kind_of(error: Exception) -> str:
    """What an error means; the library's own are those that it raises itself."""
    raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    is_ours = any(raised_in.is_relative_to(ROOT / folder) for folder in ("jattn", "pallas_kernels"))
    if is_ours and isinstance(error, ValueError | NotImplementedError):
        return "refused" if isinstance(error, NotImplementedError) else "blamed"
    is_judged = raised_in.is_relative_to(ROOT / "tests") or "numpy" in raised_in.parts
    return "wrong" if isinstance(error, AssertionError) and is_judged else "crashed"
