"""Ray and gRPC, for scale: how long the same exchange takes through what others would use.

Ray calls a method of an actor, with tensors. gRPC makes unary calls with bytes, and no serializer at all,
so its figures leave out what it would cost to make a tensor of them. Each peer is measured alone, after
everything else, since Ray brings a handful of daemons along.
"""

from __future__ import annotations

import importlib.util
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent import futures
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from bench.cases import ASYNC_CALLS, Act, timed
from bench.group import Group, GroupFailed, Job
from bench.rounds import Results, Say
from bench.rows import Row
from bench.worker import obey, quiet

SIZES = {"4B": 4, "4KiB": 4 << 10, "1MiB": 1 << 20, "64MiB": 64 << 20}
KEYS = {"empty", "async", *SIZES}
MODULES = {"Ray": "ray", "gRPC": "grpc"}

Acts = dict[str, Act]


def installed() -> dict[str, bool]:
    return {name: importlib.util.find_spec(module) is not None for name, module in MODULES.items()}


def run(
    results: Results,
    names: Sequence[str],
    rows: Sequence[Row],
    rounds: int,
    context: ForkServerContext,
    scratch: Path,
    say: Say,
    seed: int,
) -> None:
    """Measure these peers in the rows that they have, and write their figures into the results."""
    shuffler = random.Random(seed)
    wanted = [row for row in rows if row.key in KEYS]
    for name in names if wanted else ():
        figures = {row.key: results[row.key][name] for row in wanted}
        try:
            group = Group(context, _jobs(name, scratch))
        except GroupFailed as exc:
            say(f"{name}: failed: {exc}")
            for each in figures.values():
                each.failure = str(exc)
            continue
        try:
            for number in range(rounds):
                say(f"{name}: round {number + 1} of {rounds}")
                for row in shuffler.sample(wanted, len(wanted)):
                    figures[row.key].rounds.extend(row.measure(group))
        except GroupFailed as exc:
            say(f"{name}, {row.title}: failed: {exc}")
            for each in figures.values():
                each.failure = str(exc)
        finally:
            group.close()


def _jobs(name: str, scratch: Path) -> list[Job]:
    log = str(scratch / f"{name}.log")
    if name == "Ray":
        return [(serve_ray, (log,))]
    # A socket's path must be short, so it has a directory of its own.
    address = "unix:" + str(Path(tempfile.mkdtemp(dir=scratch)) / "s")
    return [(serve_grpc_client, (log, address)), (serve_grpc_server, (log, address))]


def _answer(acts: Acts, command: tuple[Any, ...]) -> list[float]:
    _, case, warmup, iterations, budget_s = command
    return timed(acts[case], warmup, iterations, budget_s)


class Echo:
    """The actor."""

    def nothing(self) -> None:
        pass

    def echo(self, x: torch.Tensor) -> torch.Tensor:
        return x


def serve_ray(pipe: Connection, log: str) -> None:
    quiet(log)
    torch.set_num_threads(1)
    import ray  # type: ignore[import-not-found,unused-ignore]

    def enter() -> Acts:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        actor = ray.remote(Echo).remote()
        ray.get(actor.nothing.remote())

        def echo(nbytes: int) -> Act:
            x = torch.rand(nbytes // 4)
            return lambda: ray.get(actor.echo.remote(x))

        return {
            "empty": lambda: ray.get(actor.nothing.remote()),
            "async": lambda: ray.get([actor.nothing.remote() for _ in range(ASYNC_CALLS)]),
            **{key: echo(nbytes) for key, nbytes in SIZES.items()},
        }

    obey(pipe, enter, _answer, lambda _: ray.shutdown())


_NO_LIMIT = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def serve_grpc_server(pipe: Connection, log: str, address: str) -> None:
    quiet(log)
    import grpc  # type: ignore[import-untyped,import-not-found,unused-ignore]

    def same(request: bytes, context: Any) -> bytes:
        return request

    def enter() -> Any:
        server = grpc.server(futures.ThreadPoolExecutor(16), options=_NO_LIMIT)
        handlers = {"echo": grpc.unary_unary_rpc_method_handler(same)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
        server.add_insecure_port(address)
        server.start()
        return server

    obey(pipe, enter, lambda server, command: None, lambda server: server.stop(None).wait())


def serve_grpc_client(pipe: Connection, log: str, address: str) -> None:
    quiet(log)
    import grpc  # type: ignore[import-untyped,import-not-found,unused-ignore]

    def enter() -> tuple[Any, Acts]:
        channel = grpc.insecure_channel(address, options=_NO_LIMIT)
        call = channel.unary_unary("/bench/echo")
        call(b"", wait_for_ready=True, timeout=30.0)

        def echo(nbytes: int) -> Callable[[], bytes]:
            payload = bytes(nbytes)
            return lambda: call(payload)

        def many() -> None:
            for future in [call.future(b"") for _ in range(ASYNC_CALLS)]:
                future.result()

        return channel, {
            "empty": lambda: call(b""),
            "async": many,
            **{key: echo(nbytes) for key, nbytes in SIZES.items()},
        }

    obey(pipe, enter, lambda place, command: _answer(place[1], command), lambda place: place[0].close())
