import functools, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from tests.pallas_kernels.test_paged_decode import random_step
from pallas_kernels.paged_decode import Tiles, paged_decode, reference
def run(hd, q_heads, kdt, vdt, qdt, qlen=1, n=16, interpret=plgpu.InterpretGPUParams(), block=16, scales=True):
    (q,k,v,*rest), kw = random_step([330,0,70,5,200], q_heads, 2, hd, block, qlen)
    q=q.astype(qdt)*3
    def cast(x, dt):
        if dt==jnp.int8: return jnp.clip(jnp.round(x.astype(jnp.float32)*40),-127,127).astype(jnp.int8)
        return x.astype(jnp.float32).astype(dt)
    k,v=cast(k,kdt),cast(v,vdt)
    f=lambda x: 0.025 if x.dtype==jnp.int8 else 1.0
    tiles=Tiles(stages=2, ctas=6, max_rows=n, by_warp=True)
    ks,vs=jnp.float32(f(k)),jnp.float32(f(v))
    out,lse=jax.jit(functools.partial(paged_decode, tiles=tiles, interpret=interpret, **kw))(q,k,v,*rest,k_scale=ks,v_scale=vs)
    want,wl=reference.paged_decode(q.astype(jnp.float32), k.astype(jnp.float32)*ks, v.astype(jnp.float32)*vs, *rest, scale=kw["score"].scale, decode_query_len=qlen)
    print(hd,q_heads,kdt.__name__,vdt.__name__,qdt.__name__, float(jnp.abs(out.astype(jnp.float32)-want).max()), float(jnp.nanmax(jnp.abs(jnp.where(jnp.isfinite(wl),lse-wl,0)))), flush=True)
if __name__=="__main__":
    interp = None if len(sys.argv)>1 else plgpu.InterpretGPUParams()
    e4,e5,i8,bf,f16=jnp.float8_e4m3fn,jnp.float8_e5m2,jnp.int8,jnp.bfloat16,jnp.float16
    for case in [(128,8,e4,e4,bf),(64,4,i8,i8,bf),(128,8,bf,bf,bf)]+([] if interp else [(256,8,e5,e5,bf),(128,16,e4,e4,f16),(80,8,e4,i8,f16),(64,8,i8,bf,bf,3,32),(128,32,e4,e4,bf),(192,8,bf,e4,bf),(64,16,f16,f16,f16,1,16,None,64)]):
        run(*case[:7], interpret=interp) if len(case)<=7 else run(*case[:7],interp,*case[8:])
