"""The frequencies of rotary position embeddings: radians a token of each pair, in float64 on the host."""

import math

import numpy as np
from jaxtyping import Float64

type Frequencies = Float64[np.ndarray, " half"]


def default(theta: float, dim: int) -> Frequencies:
    """Wavelengths from 2 pi to about 2 pi theta."""
    return theta ** -(np.arange(0, dim, 2) / dim)


def llama3(freq: Frequencies, factor: float, bounds: tuple[float, float], context: int) -> Frequencies:
    """Low frequencies are divided by a factor.

    Args:
        freq: Unscaled.
        factor: What they are divided by.
        bounds: Turns in the context: those with fewer than the first are divided, those with more than the
            second are not; in between, a blend, where they are not the same.
        context: In tokens.
    """
    low, high = bounds
    turns = context * freq / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns >= high) * 1.0
    return keep * freq + (1 - keep) * freq / factor


def yarn(
    freq: Frequencies,
    factor: float,
    bounds: tuple[float, float],
    context: int,
    theta: float,
    truncate: bool,
) -> Frequencies:
    """Low frequencies are divided by a factor, with a blend that is linear in the pair's number.

    Args:
        freq: Unscaled.
        factor: What they are divided by.
        bounds: Turns in the context where the blend begins and ends: the many first.
        context: In tokens.
        theta: Base of the wavelengths.
        truncate: The blend begins and ends at whole pairs.
    """
    dim = 2 * len(freq)
    pair_with = lambda turns: dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
    first, last = (pair_with(turns) for turns in bounds)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    scaled = np.clip((np.arange(len(freq)) - first) / width, 0, 1)
    return scaled * freq / factor + (1 - scaled) * freq
