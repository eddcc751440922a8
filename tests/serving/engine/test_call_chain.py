"""How many functions construct an engine, and lead a block table from the engine to the kernel."""

import pathlib
import sys
import traceback
import types

import pytest

import jattn
from examples.demo import TINY_MODEL
from jattn.implementations import selection
from jattn.implementations.mosaic_gpu import DecodeKernelConfig, DecodeKernelPlan, attention
from jattn.planning import layer_plans
from jattn.pytree import construct_unchecked
from jattn.serving import Engine
from pallas_kernels.paged_decode import DecodeSizes
from tests.serving.tiny import one_layer_model

ROOT = pathlib.Path(__file__).parents[3]
CALL_CHAIN = [
    "serving/engine/runner.py: run",
    "runtime/decode_graphs.py: __call__",
    "runtime/decode_graphs.py: _on_leaves",
    "serving/engine/step.py: __call__",
    "models/decoder.py: __call__",
    "models/decoder_layer.py: __call__",
    "nn.py: __call__",
    "attending.py: attend",
    "attending.py: attend_regions",
    "implementations/mosaic_gpu/attention.py: attend",
]


class ReachedError(Exception):
    """Raised when the kernel's entry is called."""


def kernel_entry(*_, **__):
    raise ReachedError


def test_a_block_table_reaches_the_kernel_in_at_most_eleven_functions(monkeypatch):
    functions = {"why_not_on": None, "is_gpu": False, "kernel_architecture": "9.0"}
    answers = {name: lambda *_, answer=answer: answer for name, answer in functions.items()}
    on_a_gpu = types.SimpleNamespace(**answers)
    monkeypatch.setattr(layer_plans, "support", on_a_gpu)
    monkeypatch.setattr(selection, "choose_kernel", lambda *_: DecodeKernelConfig(sizes=DecodeSizes()))
    nothing = construct_unchecked(DecodeKernelPlan, schedule=None, block_list=None)
    monkeypatch.setattr(layer_plans, "plan_decode_kernel", lambda *_, **__: nothing)
    monkeypatch.setattr(attention, "paged_decode", kernel_entry)
    engine = Engine(one_layer_model(), num_blocks=9, max_num_seqs=2)
    with pytest.raises(ReachedError) as reached:
        engine.generate([[1]], max_tokens=2)
    frames = traceback.extract_tb(reached.tb)
    calls = [
        f"{pathlib.Path(frame.filename).relative_to(ROOT / 'jattn')}: {frame.name}"
        for frame in frames
        if pathlib.Path(frame.filename).is_relative_to(ROOT / "jattn")
    ]
    calls = calls[calls.index(CALL_CHAIN[0]) :]
    # Ignore the frames that compile the bucket; they do not receive the table.
    compiling = ("executables.py", "decode_graphs.py: lower", "_lower")
    calls = [call for call in calls if not any(name in call for name in compiling)]
    assert calls == CALL_CHAIN
    assert len(calls) + 1 <= 11  # with the kernel's entry


@pytest.mark.kernels
def test_at_most_100_functions_in_26_files_construct_an_engine():
    model = jattn.models.load(TINY_MODEL, progress=False)
    first = Engine(model, max_num_seqs=2)  # imports modules, and is alive while the second one is constructed
    functions = set()

    def profile(frame, event, _):
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if event == "call" and file.startswith((str(ROOT / "jattn"), str(ROOT / "pallas_kernels"))):
            functions.add((file, name))

    sys.setprofile(profile)
    try:
        Engine(model, max_num_seqs=2)
    finally:
        sys.setprofile(None)
    assert first.stats.num_steps == 0
    assert len(functions) <= 100, sorted(functions)
    assert len({file for file, _ in functions}) <= 26
