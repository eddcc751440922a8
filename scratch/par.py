"""par.py i n: rows i::n of ROWS; prepared side by side, measured one at a time."""
import fcntl, os, pathlib, sys, time, functools
i, n = int(sys.argv[1]), int(sys.argv[2])
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax, jax.numpy as jnp
from benchmarks import decode as d
from benchmarks import device_time as dt
FP8, INT8, FP8T = "fp8_e4m3", "int8_token_head", "fp8_e4m3_token_head"
def row(case, quant="none", by=None, stages=None, ctas=None, layout="NHD", split=None, block=16, dtype="bfloat16"):
    return case, (block, layout, dtype, quant), (None, stages, ctas, split, by)
ROWS = eval(pathlib.Path("scratch/rows.py").read_text())
out = pathlib.Path(os.environ["OUT"]); mine = out.parent / "ready"; mine.mkdir(exist_ok=True)
class R(dt.Rows):
    def __init__(self): self.gpu = jax.devices()[0].device_kind; self.path = pathlib.Path(f"/tmp/rows-{i}.jsonl")
rows = R()
prepared = []
for case, cache, size in ROWS[i::n]:
    try:
        problem = d.inputs(d.DECODE[case], *cache)
        wanted = d.some_results(d.DECODE[case], problem, cache[1])
        args, scales = problem
        tiles = d.tiles_of(d.DECODE[case], tuple(x.dtype for x in args[1:3]), *size)
        score = d.Score(scale=d.DECODE[case].head_dim ** -0.5)
        def run(query, k, v, table, lens, scales, tiles=tiles, score=score, layout=cache[1]):
            return d.paged_decode(query, k, v, table, lens, **scales, score=score, layout=layout, tiles=tiles)[0]
        f = jax.jit(run); jax.block_until_ready(f(*args, scales)); jax.block_until_ready(list(wanted.values()))
        prepared.append((case, cache, size, problem, wanted, f))
    except Exception as e: print(case, cache, size, repr(e)[:300], flush=True)
(mine / str(i)).touch()
while len(list(mine.iterdir())) < n: time.sleep(0.05)
with open("/tmp/gpu.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    ceiling = dt.read_ceiling()
    rows.add(name="read_ceiling", gb_per_s=ceiling)
    for case, cache, size, problem, wanted, f in prepared:
        d.kernel_times = lambda _, *a: dt.kernel_times(f, *a)
        try: d.measure(rows, d.DECODE[case], ceiling, *cache, problem, wanted, size, has_wall_time=False)
        except Exception as e: print(case, cache, size, repr(e)[:300], flush=True)
