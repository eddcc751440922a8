"""From what Engine was told of speculative decoding to what does it: everything wrong is found here."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from jattn.serving.engine.draft_model import DraftModel
from jattn.serving.engine.ngram_proposer import NgramProposer
from jattn.serving.engine.served_model import MEMBERS, ServedModel, as_served
from jattn.serving.engine.sizes import StepLimits
from jattn.serving.engine.speculation import Speculation
from pallas_kernels.checks import require, require_int, require_positive, unsupported

NGRAM = "ngram"
# vLLM's other methods, which are no names of folders.
_OTHERS = ("eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "deepseek_mtp", "suffix", "draft_model")


class Drafter(NamedTuple):
    """Who drafts, checked: a lookup, a model, or neither.

    Attributes:
        num_tokens: Drafts of a row.
        lookup: Drafts on the host.
        model: Drafts on the device.
    """

    num_tokens: int
    lookup: NgramProposer | None = None
    model: ServedModel | None = None

    @property
    def told(self) -> str:
        """What must be the same in all processes, in words."""
        return f"{self.num_tokens} drafts{'' if self.model is None else ' of a model'}"


def as_drafter(speculative: Any, num_tokens: int, model: ServedModel, limits: StepLimits) -> Drafter:
    """Who drafts, loaded where it is a folder.

    Args:
        speculative: As `Engine` has it.
        num_tokens: Drafts of a row.
        model: Whose tokens are drafted.
        limits: Of its steps.

    Raises:
        ValueError: The number is not positive or leaves no room in a step, or the draft model has another
            vocabulary than the model, shorter contexts, or lies on other devices.
        NotImplementedError: It names another of vLLM's methods.
        FileNotFoundError: There is no such folder, or a file of it is missing.
    """
    if speculative is None:
        return Drafter(0)
    require_int(num_speculative_tokens=num_tokens)
    require_positive(num_speculative_tokens=num_tokens)
    most = limits.max_num_batched_tokens
    rule = f"be less than max_num_batched_tokens ({most})"
    require(num_tokens < most, "num_speculative_tokens", rule, num_tokens)
    if isinstance(speculative, NgramProposer):
        return Drafter(num_tokens, lookup=speculative)
    if isinstance(speculative, str) and speculative == NGRAM:
        return Drafter(num_tokens, lookup=NgramProposer())
    if isinstance(speculative, str) and speculative in _OTHERS and not os.path.isdir(speculative):
        way_out = 'Supported: "ngram", an NgramProposer, a model or the folder of one'
        raise unsupported(f"speculative {speculative!r}", "nobody here drafts that way", way_out)
    is_one = isinstance(speculative, str | os.PathLike) or any(hasattr(speculative, n) for n in MEMBERS)
    rule = 'be None, "ngram", an NgramProposer, a model or the folder of one'
    require(is_one, "speculative", rule, repr(speculative))
    mesh = getattr(model, "mesh", None)
    draft = as_served(speculative, mesh)
    is_beside = getattr(draft, "mesh", None) == mesh
    require(is_beside, "speculative", f"lie on the model's mesh ({mesh})", getattr(draft, "mesh", None))
    vocab, longest = model.config.vocab_size, limits.longest(model)
    rule = f"have the model's vocabulary ({vocab} tokens)"
    require(draft.config.vocab_size == vocab, "speculative", rule, f"{draft.config.vocab_size} tokens")
    reach = draft.config.max_position_embeddings
    rule = f"have the engine's {longest} positions (lower max_model_len)"
    require(reach >= longest, "speculative", rule, f"{reach} positions")
    return Drafter(num_tokens, model=draft)


def speculation_of(
    drafter: Drafter,
    model: ServedModel,
    limits: StepLimits,
    *,
    num_blocks: int,
    implementation: str | Sequence[str] | None,
) -> Speculation | None:
    """What an engine asks before each step; None where nobody drafts.

    Args:
        drafter: From as_drafter.
        model: Whose tokens are drafted.
        limits: Of its steps.
        num_blocks: Blocks of each layer's cache.
        implementation: Of a draft model's attention, as in `attend`.
    """
    num_tokens, lookup, draft = drafter
    longest = limits.longest(model)
    if lookup is not None:
        return Speculation(lookup, num_tokens, max_model_len=longest)
    if draft is None:
        return None
    proposer = DraftModel(
        draft,
        num_tokens,
        limits.draft_buckets(model, num_blocks, num_tokens),
        limits.reading_buckets(model, num_blocks),
        num_blocks=num_blocks,
        block_size=limits.block_size,
        implementation=implementation,
    )
    cost = _num_bytes(draft) / max(_num_bytes(model), 1)
    return Speculation(proposer, num_tokens, max_model_len=longest, draft_cost=cost)


def _num_bytes(model: ServedModel) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(model)))
