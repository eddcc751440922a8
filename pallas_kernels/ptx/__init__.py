"""All PTX, and all that a kernel says a lane at a time: nothing outside of this room builds either.

A module is named for what it does. Each function has a twin in plain jnp (`twins`), which interpreted kernels
and other machines run, and says what it takes for granted of JAX (`assumptions`), so that a newer one which
differs stops it with a sentence. What stays here has been measured to earn it: the table in CONTRIBUTING.
"""
