"""docs/worker-protocol.md is true: its C header is the page's layout, and a rank in C lives by it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from hosting_kit import HostKit, host_kit, region_bytes, spec

from worldmove.ipc import HEADER, MAGIC, MAX_BODY, MAX_PACKET, SyncChannel
from worldmove.manifest import Region
from worldmove.page import control, messages
from worldmove.page.control import open_own
from worldmove.page.messages import Hello, Memory, NodeMessage, Ready, Resume, Welcome, WorkerMessage

TEXT = (Path(__file__).parent.parent / "docs" / "worker-protocol.md").read_text()
RANK = Path(__file__).with_name("hosting_rank.c")
SIZE = 100_000


def header() -> str:
    (code,) = re.findall(r"```c\n(.*?)```", TEXT, re.DOTALL)
    return str(code)


def test_the_constants_are_those_of_the_page() -> None:
    found = dict(re.findall(r"#define WM_(\w+)\s+(\w+?)u?\s", header()))
    assert {name: int(value, 0) for name, value in found.items()} == {
        "PAGE_MAGIC": control.MAGIC,
        "PAGE_VERSION": control.VERSION,
        "HEADER_BYTES": control.HEADER_BYTES,
        "RANK_BYTES": control.RANK_BYTES,
        "NEVER": control.NEVER,
        "MARKS": control.MARKS,
        "VACANT": control.RankState.VACANT,
        "RUNNING": control.RankState.RUNNING,
        "STOPPED": control.RankState.STOPPED,
    }


def test_the_offsets_are_those_of_the_page() -> None:
    found = re.findall(
        r"^    (?:uint64_t|char|struct wm_slot)\s+(\w+)(?:\[\d+\])?;\s+/\*\s+(\d+)", header(), re.M
    )
    offsets = {name: int(offset) for name, offset in found if not name.startswith("reserved")}
    words = {
        "pause_at": control.PAUSE_AT,
        "progress": control.PROGRESS,
        "flags": control.FLAGS,
        "state": control.STATE,
        "stopped_ns": control.STOPPED_NS,
        "slot": control.SLOTS,
        "revisions": control.REVISIONS,
    }
    assert {name: offsets[name] for name in words} == {name: 8 * word for name, word in words.items()}
    assert (offsets["session_id_bytes"], offsets["session_id"]) == (256, control._SESSION)


def test_packets_are_as_written() -> None:
    assert f"0x{MAGIC:08X}" in TEXT
    assert HEADER.size == 12
    assert f"at most {MAX_BODY >> 20} MiB" in TEXT
    assert f"at most {MAX_PACKET >> 10} KiB" in TEXT
    assert f"**protocol {messages.PROTOCOL}** and **page version {control.VERSION}**" in TEXT


def test_every_message_is_written_with_all_its_keys() -> None:
    written = {}
    for found in re.finditer(r'{"type"', TEXT):
        example, _ = json.JSONDecoder().raw_decode(TEXT, found.start())
        written[example["type"]] = example
    kinds = {kind.__struct_config__.tag: kind for kind in (*WorkerMessage.__args__, *NodeMessage.__args__)}
    assert written.keys() == kinds.keys()
    for tag, kind in kinds.items():
        assert written[tag].keys() - {"type"} == set(kind.__struct_fields__), tag
        assert isinstance(msgspec.convert(written[tag], kind), kind)


@pytest.fixture
def rank_in_c(run_dir: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is installed")
    (run_dir / "page.h").write_text(header())
    program = run_dir / "rank"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{run_dir}"]
    subprocess.run([compiler, *flags, "-o", str(program), str(RANK)], check=True)
    return program


async def test_a_rank_in_c_lives_by_the_page(rank_in_c: Path, run_dir: Path) -> None:
    async with host_kit(run_dir) as kit:
        slot, (ticket,) = await kit.host.open_session(spec(Region("k", "uint8", (SIZE,))), "w", 1)
        sock, page, extent = await asyncio.to_thread(_handshake, kit, ticket.token)
        await kit.changes.wait(slot, "attached")
        command = [str(fd) for fd in (sock, page, extent)] + ["0", str(SIZE)]
        rank = await asyncio.create_subprocess_exec(str(rank_in_c), *command, pass_fds=(sock, page, extent))
        for fd in (sock, page, extent):
            os.close(fd)
        try:
            for _ in range(200):
                pause = await slot.ranks.pause(10)
                assert region_bytes(slot, "k") == bytes([pause.block % 251]) * SIZE
                assert pause.host_states == (str(pause.block).encode(),)
                await slot.ranks.roll.ask(10)
                pause.resume()
            (await slot.ranks.pause(10)).moved("B", None)
            assert await rank.wait() == 0
        finally:
            if rank.returncode is None:
                rank.kill()
                await rank.wait()


def _handshake(kit: HostKit, token: str) -> tuple[int, int, int]:
    """What the C program is spared: the exchange of the first messages."""
    channel: SyncChannel[NodeMessage] = SyncChannel.connect(str(kit.host.socket_path), NodeMessage)
    channel.send(Hello(token))
    fds: list[int] = []
    for kind in (Welcome, Memory):
        got = channel.receive(10)
        assert got is not None
        assert isinstance(got[0], kind)
        fds += got[1]
    page, memory = fds
    channel.send(Ready())
    resume = channel.receive(10)
    assert resume is not None
    assert isinstance(resume[0], Resume)
    own = open_own(page)
    os.close(page)
    sock = os.dup(channel.fileno())
    os.set_blocking(sock, True)
    channel.close()
    return sock, own, memory
