"""Another user on the host: can connect to whatever the file system lets them, and read what is public. They get no word."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.workers import eventually

from farstep import rpc
from farstep.errors import RpcError
from farstep.rpc.group import join_group
from security.attackers import PATIENCE_S, call
from security.test_store_writer import WrittenStore, changed

AS_NOBODY = "import os, socket, sys\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"


def run_as_nobody(script: str, *args: str) -> int:
    """The exit code of a script that another user runs, with Python's standard library only."""
    command = [sys._base_executable, "-I", "-c", AS_NOBODY + script, *args]  # type: ignore[attr-defined]
    return subprocess.run(command, timeout=PATIENCE_S, check=False).returncode


def test_the_unix_socket_is_in_a_directory_for_its_user_only() -> None:
    with rpc.local_agents(1) as (agent,):
        path = Path(str(agent.links.me.card.unix))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert path.parent.stat().st_uid == os.getuid()
    assert not path.parent.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_cannot_open_the_socket() -> None:
    with rpc.local_agents(1) as (agent,):
        path = str(agent.links.me.card.unix)
        script = (
            "sock = socket.socket(socket.AF_UNIX)\n"
            "try:\n    sock.connect(sys.argv[1])\nexcept PermissionError:\n    sys.exit(7)\n"
        )
        assert run_as_nobody(script, path) == 7


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_is_refused_even_if_it_can_open_the_socket() -> None:
    with rpc.local_agents(2) as agents:
        path = Path(str(agents[0].links.me.card.unix))
        path.parent.chmod(0o755)
        path.chmod(0o777)
        script = (
            "sock = socket.socket(socket.AF_UNIX); sock.settimeout(20); sock.connect(sys.argv[1])\n"
            "sys.exit(7 if sock.recv(100) == b'' else 1)\n"
        )
        assert run_as_nobody(script, str(path)) == 7  # hung up on, without a word
        assert call(agents[0], "worker1") == 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def join_and_call(store: WrittenStore, options: rpc.RpcOptions) -> None:
    second = join_group(store, "worker1", 1, None, options)  # type: ignore[arg-type]
    try:
        second.call_sync("worker0", len, ((),), {}, PATIENCE_S)
    finally:
        second.close()


def test_a_worker_does_not_speak_to_a_socket_of_another_user(tmp_path: Path) -> None:
    """Whoever writes the store may name a socket of theirs as a worker's."""
    place = tmp_path / "theirs"
    place.mkdir()
    place.chmod(0o777)
    for parent in place.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    path = place / "s"
    script = (
        "sock = socket.socket(socket.AF_UNIX); sock.bind(sys.argv[1] + 't'); sock.listen(); os.rename(sys.argv[1] + 't', sys.argv[1])\n"
        "sock.settimeout(20); peer, _ = sock.accept(); peer.settimeout(20)\n"
        "try:\n    peer.sendall(b'farstep\\x02' + bytes(32))\n    sys.exit(7 if peer.recv(100) == b'' else 1)\nexcept ConnectionError:\n    sys.exit(7)\n"
    )
    command = [sys._base_executable, "-I", "-c", AS_NOBODY + script, str(path)]  # type: ignore[attr-defined]
    with subprocess.Popen(command) as theirs:
        eventually(path.exists, "their socket")
        store = WrittenStore()
        options = rpc.RpcOptions(transport="unix", init_timeout_s=20)
        first = join_group(store, "worker0", 0, None, options)  # type: ignore[arg-type]
        store.changes["card/1"] = changed(unix=str(path))
        try:
            with pytest.raises(RpcError, match="uid 65534"):
                join_and_call(store, options)
        finally:
            first.close()
        assert theirs.wait(PATIENCE_S) == 7  # it was told nothing
