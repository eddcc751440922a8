"""Kinds of fuzzer cases: each case is drawn from a seed, run and checked."""

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
    """Return the case of a seed: a dict of literals."""
    if kind == "moves":
        return moves.draw(seed)
    if kind == "dense":
        return dense.draw(seed)
    if kind == "gradients":
        return gradients.draw(seed)
    return draw_attention(kind, seed, is_large=is_large)


def check(kind: str, case: dict) -> None:
    """Raise an AssertionError for a wrong result, or whatever the library raises."""
    checks = {"moves": moves.check, "gradients": gradients.check, "dense": dense.check}
    checks.get(kind, attention.check)(case)


def outcome_of(kind: str, seed: int, *, is_large: bool = False) -> dict:
    """Return the outcome of a case.

    "passed"; "refused": NotImplementedError of the library; "blamed": the library raises ValueError although
    the case is valid; "wrong": a wrong result; "crashed": any other error.
    """
    case, start = draw(kind, seed, is_large=is_large), time.monotonic()
    outcome, detail = "passed", ""
    try:
        check(kind, case)
    except Exception as error:
        outcome, detail = classify_error(error), f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - start, 2)
    return {
        "kind": kind,
        "seed": seed,
        "outcome": outcome,
        "detail": detail[:500],
        "seconds": seconds,
        "case": case,
    }


def classify_error(error: Exception) -> str:
    """Return the outcome that an error stands for; only errors raised in the library count as refusals."""
    raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    is_raised_by_library = any(
        raised_in.is_relative_to(ROOT / folder) for folder in ("jattn", "pallas_kernels")
    )
    if is_raised_by_library and isinstance(error, ValueError | NotImplementedError):
        return "refused" if isinstance(error, NotImplementedError) else "blamed"
    is_raised_by_check = raised_in.is_relative_to(ROOT / "tests") or "numpy" in raised_in.parts
    return "wrong" if isinstance(error, AssertionError) and is_raised_by_check else "crashed"
