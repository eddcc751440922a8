"""Two processes beside each other: `jax.distributed` of one host."""

import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_both(commands, env=None):
    """Exit code, lines of stdout and stderr of both, each a module with its words."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "env": env}
    both = [subprocess.Popen([sys.executable, "-m", *command], **pipes) for command in commands]
    try:
        done = [process.communicate(timeout=240) for process in both]
    finally:
        for process in both:
            process.kill()
    said = lambda out: [line for line in out.splitlines() if not line.startswith("[Gloo]")]
    return [(one.returncode, said(out), err) for one, (out, err) in zip(both, done, strict=True)]
