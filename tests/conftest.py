"""Set-up of all tests: runtime checks of shapes and dtypes, strict dtype promotion, cached executables."""

import gc
import json
import os
import pathlib
import time

import hypothesis
import jaxtyping
import pytest

from tests.type_checks import jaxtyped

EXECUTABLES = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "executables"
# CPU threads of XLA: each waiting interpreted warpgroup occupies one, and one per core is too few.
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("JAX_PLATFORMS", "cuda" if os.environ.get("JATTN_TEST_GPU") else "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Programs are compiled and run once, on small inputs. LLVM's passes took a third of the time, and
    # lowering fusions through MLIR two fifths of the rest, so both are disabled. Splitting a program into
    # parts that are compiled in parallel costs a fifth of its compile time; there is one core per worker.
    straight = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    whole = "--xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", f"--xla_backend_optimization_level=0 {straight} {whole}")
# Many tests, workers and subprocesses build the same programs, which are compiled once.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(EXECUTABLES))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests use no network
jaxtyping.jaxtyped = jaxtyped
jaxtyping.install_import_hook(["jattn", "pallas_kernels"], "beartype.beartype")

import jax  # noqa: E402  (after the platform is chosen)
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from pallas_kernels import checks  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("jattn", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("jattn")

DAY = 24 * 3600
KERNELS = os.path.join(os.path.dirname(__file__), "pallas_kernels", "")
GOLDEN = pathlib.Path(__file__).parent / "golden"


def pytest_sessionstart(session):
    """Make the kernels' interpreter faster, and delete cached executables older than a day.

    Changed programs never use old executables again.
    """
    from tests import interpreter

    interpreter.pass_numpy_arrays()
    if not hasattr(session.config, "workerinput"):
        for file in EXECUTABLES.rglob("*"):
            if file.is_file() and time.time() - file.stat().st_mtime > DAY:
                file.unlink(missing_ok=True)


def pytest_collection_modifyitems(items):
    """Mark the tests in tests/pallas_kernels as kernel tests, before pytest selects by marks."""
    for item in items:
        if str(item.path).startswith(KERNELS):
            item.add_marker("kernels")


def pytest_collection():
    """Disable garbage collection while modules are imported and tests are collected."""
    gc.disable()


def pytest_collection_finish():
    """Enable garbage collection again and exempt all objects that exist now."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def metadata_cases():
    """Return the numeric cases of vLLM's pure helpers by name."""
    cases = json.loads((GOLDEN / "metadata_cases.json").read_text())["cases"]
    return {name: case["items"] for name, case in cases.items()}


@pytest.fixture
def types_unchecked():
    """Disable the runtime type checks, so that wrong arguments reach the library's own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def warned_lines(monkeypatch):
    """Skip the frames of the runtime type checks, so that warnings name the same line as without them."""
    files = pathlib.Path(__file__).with_name("type_checks"), pathlib.Path(jaxtyping.__file__).parent
    type_checks = ("<@beartype", *map(str, files))
    monkeypatch.setattr(checks, "INTERNAL_FILES", (*checks.INTERNAL_FILES, *type_checks))


@pytest.fixture
def traced_once():
    """Return a function that runs another under jit on several batches and asserts that it is traced once."""

    def run(function, *batches):
        num_traces = 0

        def counted(*args):
            nonlocal num_traces
            num_traces += 1
            return function(*args)

        jitted = jax.jit(counted)
        results = [jitted(*batch) for batch in batches]
        assert num_traces == 1
        return results

    return run


@pytest.fixture(autouse=True)
def _retrace_attention_if_patched(request):
    """Clear jit caches of attention around tests that patch its functions, so that no old trace is reused."""
    if "monkeypatch" not in request.fixturenames:
        yield
        return
    from jattn import attending
    from jattn.dense import per_shard
    from jattn.parallel import context_parallel
    from jattn.planning import plans

    with pytest.MonkeyPatch.context() as patch:
        for module in (attending, per_shard, context_parallel):
            patch.setattr(module, "attend_regions", module.attend_regions.__wrapped__)
        patch.setattr(plans, "plan_regions_jitted", plans.plan_regions)
        yield


@pytest.fixture
def jax_cache(tmp_path):
    """Return the empty folder of JAX's compilation cache, which takes programs of any compile time."""
    folder = tmp_path / "jax-cache"
    folder.mkdir()
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    compilation_cache.reset_cache()  # Otherwise JAX keeps using its previous folder.
    for name, value in options.items():
        jax.config.update(name, value)
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
