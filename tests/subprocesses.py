"""Runs several processes of one host side by side, as `jax.distributed` needs them."""

import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def free_port():
    """Return a TCP port that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_processes(commands, env=None):
    """Run Python modules at the same time; return each one's exit code, stdout lines and stderr.

    Args:
        commands: For each process a list: the module's name, then its arguments.
        env: Environment variables; None = this process's.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "env": env}
    processes = [subprocess.Popen([sys.executable, "-m", *command], **pipes) for command in commands]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    lines = lambda out: [line for line in out.splitlines() if not line.startswith("[Gloo]")]
    return [
        (process.returncode, lines(out), err) for process, (out, err) in zip(processes, outputs, strict=True)
    ]
