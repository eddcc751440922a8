"""PTX and all other code that a kernel builds per lane; no other package but `collectives.ptx` builds any.

Each function has a fallback in plain jnp for interpret mode and other platforms (`fallback`). `layouts`
compares what the code assumes about register and memory layouts with what JAX reports, so that another
version of JAX fails with a message. docs/kernels.md has the measurements that justify the code.
"""
