"""Serve replicas of an engine with Ray Serve, on one machine or on many.

python -m examples.ray_serve DIR [--num-replicas 2] [--num-gpus 1] [--port 8000]

Run `pip install 'ray[serve]' '.[serve]'` on each machine first. Ray starts the replicas, replaces those that
fail, and by default sends each request to the less busy of two random replicas.
"""

import argparse
import pathlib
import signal
from typing import Any

from ray import serve
from ray.serve.config import HTTPOptions
from starlette.types import Receive, Scope, Send

from jattn.models import load
from jattn.serving import AsyncEngine, Engine
from jattn.serving.server import ServerOptions, Service, build_app

# Maximum requests at a replica per request of a step. The additional ones wait there and start without delay.
REQUESTS_PER_SLOT = 2


async def to_replica(scope: Scope, receive: Receive, send: Send) -> None:
    """Pass a request to the application of this process's replica."""
    if scope["type"] == "http":
        await serve.get_replica_context().servable_object.app(scope, receive, send)


@serve.deployment
@serve.ingress(lambda: to_replica)
class Replica:
    """An engine with the endpoints of `jattn serve`."""

    def __init__(self, folder: str, names: tuple[str, ...], engine_options: dict[str, Any]) -> None:
        engine = Engine(load(folder), **engine_options)
        engine.precompile(progress=False, wait=False)
        options = ServerOptions(served_model_names=names, folder=pathlib.Path(folder))
        self.engine = AsyncEngine(engine)
        self.service = Service(self.engine, options)
        self.service.is_ready = True  # Ray sends no request before this method returns.
        self.app = build_app(self.service)

    def check_health(self) -> None:
        """Check the engine. Ray replaces a replica whose check raises."""
        self.engine.stats  # noqa: B018

    async def __del__(self) -> None:
        """Close the engine. Ray has let all requests finish."""
        await self.engine.aclose()


def application(
    folder: str,
    *,
    num_replicas: int = 1,
    num_gpus: float = 1,
    names: tuple[str, ...] = ("model",),
    **engine_options: Any,
) -> serve.Application:
    """Return the application for `ray.serve.run`: replicas of an engine.

    Args:
        folder: Hugging Face model folder, on each machine.
        num_replicas: Number of replicas.
        num_gpus: Number of GPUs per replica.
        names: Model names in the API.
        engine_options: Arguments of `jattn.serving.Engine`.
    """
    num_seqs = engine_options.setdefault("max_num_seqs", 256)  # The engine's default on a GPU.
    deployment: Any = Replica
    replica = deployment.options(
        num_replicas=num_replicas,
        ray_actor_options={"num_gpus": num_gpus, "num_cpus": 1},
        max_ongoing_requests=REQUESTS_PER_SLOT * num_seqs,
    )
    return replica.bind(folder, names, engine_options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", help="Hugging Face model folder, on each machine")
    parser.add_argument(
        "--num-replicas", type=int, default=1, help="number of replicas (default: %(default)s)"
    )
    parser.add_argument(
        "--num-gpus", type=float, default=1, help="number of GPUs per replica (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=256,
        help="maximum number of requests per step (default: %(default)s)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=8192,
        help="maximum number of tokens per step (default: %(default)s)",
    )
    args = parser.parse_args()
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=args.port))
    limits = {"max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": args.max_num_batched_tokens}
    app = application(
        args.folder,
        num_replicas=args.num_replicas,
        num_gpus=args.num_gpus,
        names=(pathlib.Path(args.folder).name,),
        **limits,
    )
    serve.run(app)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()


if __name__ == "__main__":
    main()
