"""Run Python modules in other processes, as copies of a process that has imported what most of them need."""

import atexit
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
# Importing these takes seconds. None of them creates a JAX backend, which a copy could not use.
IMPORTED_BY_MOST = (
    "flax.nnx",
    "jax.experimental.topologies",
    "jattn.models",
    "jattn.serving",
    "pallas_kernels.varlen_backward",
    "transformers.models.auto.configuration_auto",
)


class Completed(NamedTuple):
    """Exit code and output of a process."""

    returncode: int
    stdout: str
    stderr: str


class ForkServer:
    """A process that starts others: copies of itself, which begin with the imported modules but no backend.

    It ends with this process.

    Args:
        modules: Modules that it imports first.
        env: Environment variables, besides those of this process, that must be set before the imports.
    """

    def __init__(self, modules, env=None):
        command = [sys.executable, "-m", "tests.subprocesses", *modules]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | (env or {}), text=True, **pipes)
        atexit.register(self.process.communicate)  # closes its input and waits

    def run(self, commands, env=None, seconds=240):
        """Run modules at the same time, as `python -m` does, and return what each completed with.

        Args:
            commands: For each process a list: the module's name, then its arguments.
            env: Environment variables to set besides those of the server.
            seconds: Time after which processes are killed.
        """
        commands = [[str(word) for word in command] for command in commands]
        with tempfile.TemporaryDirectory() as folder:
            files = [[f"{folder}/{i}.out", f"{folder}/{i}.err"] for i in range(len(commands))]
            request = json.dumps([commands, files, env or {}, seconds])
            print(request, file=self.process.stdin, flush=True)
            codes = self.process.stdout.readline()
            assert codes, "the process that starts other processes has ended"
            texts = [[pathlib.Path(file).read_text() for file in pair] for pair in files]
        return [Completed(code, *pair) for code, pair in zip(json.loads(codes), texts, strict=True)]


def free_port():
    """Return a TCP port that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@functools.cache
def _server():
    return ForkServer(IMPORTED_BY_MOST)


def run_module(*command, env=None, seconds=400):
    """Run a Python module as `python -m` does and return what it completed with; see `ForkServer.run`."""
    return _server().run([command], env, seconds)[0]


def run_processes(commands, env=None):
    """Run Python modules at the same time; return each one's exit code, stdout lines and stderr.

    Args:
        commands: For each process a list: the module's name, then its arguments.
        env: Environment variables to set besides those of this process.
    """
    lines = lambda out: [line for line in out.splitlines() if not line.startswith("[Gloo]")]
    return [(code, lines(out), error) for code, out, error in _server().run(commands, env)]


def serve(modules):
    """Run the commands of each request of the standard input, and print their exit codes."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that collections in copies do not visit, and copy, all that was imported
    for line in sys.stdin:
        commands, files, env, seconds = json.loads(line)
        copies = []
        for command, outputs in zip(commands, files, strict=True):
            copies.append(os.fork())
            if copies[-1] == 0:
                run_here(command, outputs, env)
                return
        print(json.dumps(wait_for(copies, seconds)), flush=True)


def run_here(command, outputs, env):
    """Run a command in this process, with files as its standard output and error."""
    for descriptor, file in enumerate(outputs, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(env)
    for name in filter(lambda name: name.startswith("JAX_"), env):  # JAX has read its variables already
        option = name.lower()
        jax = importlib.import_module("jax")
        jax.config.update(option, type(getattr(jax.config, option))(env[name]))
    module, *sys.argv[1:] = command
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def wait_for(processes, seconds):
    """Return the exit codes of processes; those that do not end in time are killed."""
    codes, end = {}, time.monotonic() + seconds
    while len(codes) < len(processes):
        for process in processes:
            ended, status = (0, 0) if process in codes else os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
            elif process not in codes and time.monotonic() > end:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[process] for process in processes]


if __name__ == "__main__":
    serve(sys.argv[1:])
