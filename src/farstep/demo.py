"""`farstep demo`: three workers for a few seconds, and what crosses between them.

The workers' side is here: the acts, each of which checks its own result, and the counting. The parent's side, what a
person sees, is `demo_display.py`.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from farstep import rpc
from farstep.demo_display import Display
from farstep.errors import RpcError, WorkerLost
from farstep.launch.local import LocalWorkers, tell
from farstep.rpc.current import current_agent

__all__ = ["run_demo"]

NAMES: Final = ("ada", "bob", "cyd")
VICTIM: Final = "cyd"
SIZE: Final = 576
ACT_S: Final = 1.0
HOPS: Final = 12
BURST: Final = 500
TELL_EVERY_S: Final = 0.04
ACTS: Final = {
    "calls": "small calls, round robin",
    "matrix": "matrix products, in pieces",
    "rref": "one RRef, passed around",
    "burst": "bursts of asynchronous calls",
    "error": "an exception on another worker",
    "loss": f"{VICTIM} is killed (SIGKILL)",
}


def run_demo() -> int:
    """Run it, show it, and return the exit code: 0 when every result was right."""
    display = Display(NAMES, ACTS)
    try:
        with display, LocalWorkers(play, len(NAMES), names=NAMES, timeout_s=60.0) as workers:

            def on_message(name: str, message: tuple[str, Any]) -> None:
                kind, body = message
                if kind == "kill":
                    display.killed(body, workers.pid(body), time.monotonic())
                    workers.kill(body)
                else:
                    display.hear(name, kind, body)

            workers.wait(on_message)
    except KeyboardInterrupt:
        display.say("interrupted: the three workers have been stopped")
        return 130
    except (RpcError, AssertionError, OSError, ValueError, TypeError, KeyError) as exc:
        display.fail(exc)
        return 1
    return display.finish()


# -- counting --------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What one worker sent to another by its calls, and got back in their results."""

    calls: int = 0
    tensors: int = 0
    nbytes: int = 0


@dataclass
class Books:
    """One worker's own account of its calls, told to the parent now and then. Any thread."""

    name: str
    to: dict[str, Traffic] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    told_at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def peers(self) -> list[str]:
        """The others, the next in rank first."""
        at = NAMES.index(self.name)
        return [*NAMES[at + 1 :], *NAMES[:at]]

    def count(self, peer: str, *values: Any) -> None:
        with self.lock:  # calls that this worker serves call on, from other threads
            traffic = self.to.setdefault(peer, Traffic())
            traffic.calls += 1
            for value in values:
                if isinstance(value, torch.Tensor):
                    traffic.tensors += 1
                    traffic.nbytes += value.nbytes
        if time.monotonic() - self.told_at > TELL_EVERY_S:
            self.tell()

    def tell(self) -> None:
        self.told_at = time.monotonic()
        info = current_agent().get_debug_info()
        tell(
            (
                "books",
                {
                    "to": {peer: (t.calls, t.tensors, t.nbytes) for peer, t in self.to.items()},
                    "wire_sent": info["agent.bytes_sent"],
                    "wire_received": info["agent.bytes_received"],
                    "latency_s": statistics.median(self.latencies_s) if self.latencies_s else None,
                },
            )
        )

    def call(self, peer: str, fn: Callable[..., Any], *args: Any) -> Any:
        begin = time.perf_counter()
        result = rpc.rpc_sync(peer, fn, args=args)
        self.latencies_s.append(time.perf_counter() - begin)
        self.count(peer, *args, result)
        return result


books_of_this_worker = Books("none")


# -- the acts: each runs on every worker at once, and says what it found ---------------------------------


def play(rank: int) -> None:
    """The life of a demo worker."""
    logging.getLogger("farstep").setLevel(logging.CRITICAL)  # what goes wrong here goes wrong on purpose
    torch.manual_seed(rank)
    global books_of_this_worker
    books_of_this_worker = books = Books(NAMES[rank])
    for act, run in (
        ("calls", calls),
        ("matrix", matrix),
        ("rref", pass_rref),
        ("burst", burst),
        ("error", error),
    ):
        rpc.barrier()
        tell(("begin", act))
        right, said = run(books)
        books.tell()
        tell(("end", (act, right, said)))
    rpc.barrier()
    tell(("begin", "loss"))
    right, said = lose_one(books)
    books.tell()
    tell(("end", ("loss", right, said)))


def _progress(act: str, done: float) -> None:
    tell(("progress", (act, min(1.0, done))))


def calls(books: Books) -> tuple[bool, str]:
    """Small calls to each peer in turn, one at a time."""
    begin, count, right = time.monotonic(), 0, True
    ones = torch.ones(4)
    while (passed := time.monotonic() - begin) < ACT_S:
        for peer in books.peers:
            count += 1
            right &= bool(torch.equal(books.call(peer, torch.add, ones, count), ones + count))
        if count % 50 == 0:
            _progress("calls", passed / ACT_S)
    return right, f"{count:,} calls, each answer right"


def matrix(books: Books) -> tuple[bool, str]:
    """Products whose rows are computed by the peers. Whole numbers, so that 'equal' can mean equal."""
    begin, products, right = time.monotonic(), 0, True
    while (passed := time.monotonic() - begin) < ACT_S:
        a, b = (torch.randint(-8, 9, (SIZE, SIZE)).float() for _ in range(2))
        pieces = a.chunk(4)
        futures = []
        for i, piece in enumerate(pieces):
            peer = books.peers[i % 2]
            futures.append(rpc.rpc_async(peer, torch.mm, args=(piece, b)))
        answers = torch.futures.wait_all(futures)
        for i, (piece, answer) in enumerate(zip(pieces, answers, strict=True)):
            books.count(books.peers[i % 2], piece, b, answer)
        right &= bool(torch.equal(torch.cat(answers), a @ b))
        products += 1
        _progress("matrix", passed / ACT_S)
    return right, f"{products} of {SIZE} x {SIZE}, equal to torch's own"


class Guestbook:
    """Lives on one worker; the others sign it through a reference."""

    def __init__(self) -> None:
        self.signatures: list[str] = []

    def sign(self, name: str) -> int:
        self.signatures.append(name)
        return len(self.signatures)

    def read(self) -> list[str]:
        return self.signatures


def sign_and_pass_on(book: rpc.RRef[Guestbook], hops_left: int) -> None:
    """Runs on each worker in turn, inside the call of the one before."""
    me, books = rpc.get_worker_info(), books_of_this_worker
    book.rpc_sync().sign(me.name)
    if not book.is_owner():
        books.count(book.owner_name())
    if hops_left > 1:
        rpc.rpc_sync(books.peers[0], sign_and_pass_on, args=(book, hops_left - 1))
        books.count(books.peers[0])


def owned_values() -> int:
    return current_agent().rrefs.counts()["num_owner_rrefs"]


def pass_rref(books: Books) -> tuple[bool, str]:
    """A reference goes round the workers, call within call, and its owner forgets the value at the end."""
    first = books.peers[0]
    expected = [NAMES[(NAMES.index(first) + hop) % len(NAMES)] for hop in range(HOPS)]
    right, rounds, begin = True, 0, time.monotonic()
    while (passed := time.monotonic() - begin) < ACT_S / 2:
        book: rpc.RRef[Guestbook] = rpc.remote(books.peers[1], Guestbook)
        books.count(books.peers[1])
        books.call(first, sign_and_pass_on, book, HOPS)
        right &= book.rpc_sync().read() == expected
        books.count(books.peers[1])
        del book
        rounds += 1
        _progress("rref", passed * 2 / ACT_S)
    rpc.barrier()
    deadline = time.monotonic() + 5.0
    while (kept := owned_values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return right and not kept, f"{rounds} x {HOPS} hops, call in call; {kept} values left"


def burst(books: Books) -> tuple[bool, str]:
    """Many calls under way at once."""
    begin, count, right = time.monotonic(), 0, True
    while (passed := time.monotonic() - begin) < ACT_S:
        futures = [rpc.rpc_async(books.peers[i % 2], max, args=(i, 7)) for i in range(BURST)]
        answers = torch.futures.wait_all(futures)
        right &= answers == [max(i, 7) for i in range(BURST)]
        for i in range(BURST):
            books.count(books.peers[i % 2])
        count += BURST
        _progress("burst", passed / ACT_S)
    return right, f"{count:,} calls, {count / passed:,.0f} a second"


def read_setting(name: str) -> float:
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    return settings[name]


def error(books: Books) -> tuple[bool, str]:
    """A mistake on a peer arrives as what it is, with where it happened."""
    try:
        books.call(books.peers[0], read_setting, "learning_rte")
    except KeyError as exc:
        books.count(books.peers[0])
        text = getattr(exc, "remote_traceback", "")
        if books.name == NAMES[0]:
            tell(("traceback", (books.peers[0], text)))
        right = getattr(exc, "remote_worker", "") == books.peers[0] and "read_setting" in text
        return right, f"{type(exc).__name__} from {books.peers[0]}, with its traceback"
    return False, "no exception arrived"


def lose_one(books: Books) -> tuple[bool, str]:
    """One worker is killed while the others wait for it; they notice, and go on."""
    if books.name == VICTIM:
        books.tell()
        time.sleep(30.0)
        return False, "it was not killed"
    waiting = rpc.rpc_async(VICTIM, time.sleep, args=(30.0,))
    books.count(VICTIM)
    if books.name == NAMES[0]:
        time.sleep(0.5)
        tell(("kill", VICTIM))
    try:
        waiting.wait()
        return False, f"{VICTIM} answered"
    except WorkerLost as exc:
        tell(("noticed", (exc.worker, time.monotonic())))
        lost = exc.worker
    other = next(peer for peer in books.peers if peer != VICTIM)
    right = lost == VICTIM and books.call(other, max, 1, 2) == 2
    return right, f"WorkerLost names {lost}; the others go on"
