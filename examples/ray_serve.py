"""Replicas of `jattn serve` behind Ray Serve, on one machine or on many.

python -m examples.ray_serve DIR [--num-replicas 2] [--num-gpus 1] [--port 8000]

It takes `pip install 'ray[serve]' '.[serve]'` on each machine. Ray starts the replicas, puts others in the
place of those that die, and hands a request to the less busy of two, which is its default.
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

ROOM = 2  # requests at a replica for each one that a step holds: the rest wait there, and begin at once


async def to_replica(scope: Scope, receive: Receive, send: Send) -> None:
    """Hands a request to the application of the replica whose process this is."""
    if scope["type"] == "http":
        await serve.get_replica_context().servable_object.served(scope, receive, send)


@serve.deployment
@serve.ingress(lambda: to_replica)
class Replica:
    """An engine, and the paths of its server."""

    def __init__(self, folder: str, names: tuple[str, ...], engine_options: dict[str, Any]) -> None:
        engine = Engine(load(folder), **engine_options)
        engine.precompile(progress=False, wait=False)
        options = ServerOptions(served_model_names=names, folder=pathlib.Path(folder))
        self.engine = AsyncEngine(engine)
        self.service = Service(self.engine, options)
        self.service.is_ready = True  # Ray sends nothing before this returns
        self.served = build_app(self.service)

    def check_health(self) -> None:
        """Asked by Ray, which replaces a replica that raises."""
        self.engine.stats  # noqa: B018

    async def __del__(self) -> None:
        """Requests have been let finish by now."""
        await self.engine.aclose()


def application(
    folder: str,
    *,
    num_replicas: int = 1,
    num_gpus: float = 1,
    names: tuple[str, ...] = ("model",),
    **engine_options: Any,
) -> serve.Application:
    """What `ray.serve.run` runs: so many replicas of an engine, one a GPU."""
    num_seqs = engine_options.setdefault("max_num_seqs", 256)  # an engine's own on a GPU
    deployment: Any = Replica
    replica = deployment.options(
        num_replicas=num_replicas,
        ray_actor_options={"num_gpus": num_gpus, "num_cpus": 1},
        max_ongoing_requests=ROOM * num_seqs,
    )
    return replica.bind(folder, names, engine_options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", help="a Hugging Face folder, on each machine")
    parser.add_argument("--num-replicas", type=int, default=1)
    parser.add_argument("--num-gpus", type=float, default=1, help="of a replica")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    args = parser.parse_args()
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=args.port))
    limits = {"max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": args.max_num_batched_tokens}
    many = {"num_replicas": args.num_replicas, "num_gpus": args.num_gpus}
    serve.run(application(args.folder, names=(pathlib.Path(args.folder).name,), **many, **limits))
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()


if __name__ == "__main__":
    main()
