"""The reference world: the same bits wherever it goes on, and no bit of the state without effect."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from worldmove import manifest
from worldmove.demo.frames import BLOCK_FRAMES, HEIGHT, WIDTH
from worldmove.demo.model import LAYERS, Model
from worldmove.demo.player import action
from worldmove.demo.world import FULL_AFTER, HOST_STATE_BYTES, SINK, WINDOW, Size, World, cache_names
from worldmove.errors import ValidationError

SEED = 2**64 - 3
SMALL = Size(1)


@pytest.fixture(scope="module")
def network() -> Model:
    return Model()


@pytest.fixture(scope="module")
def film(network: Model) -> list[bytes]:
    """Blocks 1 to 20 of a world that nothing ever happens to."""
    return play(start(network)[0], 20)


Rolling = tuple[dict[str, np.ndarray], bytes, list[bytes]]


@pytest.fixture(scope="module")
def rolling(network: Model) -> Rolling:
    """A world whose window is full: its arrays, its host state, and the blocks that follow."""
    world, arrays = start(network, Size(2))
    play(world, FULL_AFTER + 1)
    return elsewhere(arrays), world.host_state(), play(world, FULL_AFTER)


def start(network: Model, size: Size = SMALL) -> tuple[World, dict[str, np.ndarray]]:
    arrays = size.allocate()
    world = World(network, size, arrays)
    world.begin(SEED)
    return world, arrays


def play(world: World, blocks: int) -> list[bytes]:
    return [world.step(action(world.block + 1).keys).tobytes() for _ in range(blocks)]


def elsewhere(arrays: dict[str, np.ndarray], shift: int = 0) -> dict[str, np.ndarray]:
    """Copies of `arrays` in other memory, `shift` bytes off any alignment."""
    copies = {}
    for name, array in arrays.items():
        memory = np.full(array.nbytes + 64, 0xA5, np.uint8)
        copy = memory[shift : shift + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        copies[name] = copy
    return copies


def test_frames_have_their_shape_and_change(network: Model) -> None:
    world, _ = start(network)
    frames = world.step(action(1).keys)
    assert frames.shape == (BLOCK_FRAMES, HEIGHT, WIDTH, 3)
    assert frames.dtype == np.uint8
    assert len({frame.tobytes() for frame in frames}) == BLOCK_FRAMES
    assert frames.std() > 20


def test_two_worlds_of_one_seed_are_one_film(network: Model, film: list[bytes]) -> None:
    assert play(start(Model())[0], 9) == film[:9]
    other = World(network, SMALL, SMALL.allocate())
    other.begin(SEED - 1)
    assert play(other, 1) != film[:1]


@pytest.mark.parametrize("stop", [1, FULL_AFTER - 1, FULL_AFTER, FULL_AFTER + 1, 12])
@pytest.mark.parametrize("shift", [0, 3])
def test_goes_on_elsewhere_bit_for_bit(network: Model, film: list[bytes], stop: int, shift: int) -> None:
    world, arrays = start(network)
    play(world, stop)
    copies = elsewhere(arrays, shift)
    again = World(network, SMALL, copies)
    again.restore(world.host_state())
    assert again.block == stop
    assert play(again, 16 - stop) == film[stop:16]


def test_state_is_equal_after_equal_blocks(network: Model) -> None:
    one, mine = start(network, Size(3))
    play(one, 10)
    two = World(network, Size(3), theirs := Size(3).allocate())
    for array in theirs.values():
        array.view(np.uint8).fill(0xC3)
    two.begin(SEED)
    play(two, 10)
    assert one.host_state() == two.host_state()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_goes_on_in_another_process_bit_for_bit(network: Model, film: list[bytes], tmp_path) -> None:
    world, arrays = start(network)
    play(world, 9)
    np.savez(tmp_path / "state.npz", **arrays)
    (tmp_path / "host").write_bytes(world.host_state())
    program = (
        "import sys, hashlib, numpy as np\n"
        "from worldmove.demo.model import Model\n"
        "from worldmove.demo.player import action\n"
        "from worldmove.demo.world import Size, World\n"
        "arrays = dict(np.load(sys.argv[1]))\n"
        "world = World(Model(), Size(1), arrays)\n"
        "world.restore(open(sys.argv[2], 'rb').read())\n"
        "film = b''.join(world.step(action(world.block + 1).keys).tobytes() for _ in range(4))\n"
        "sys.stdout.write(hashlib.sha256(film).hexdigest())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, tmp_path / "state.npz", tmp_path / "host"],
        capture_output=True,
        check=True,
        text=True,
        env=os.environ,
    )
    assert done.stdout == hashlib.sha256(b"".join(film[9:13])).hexdigest()


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, where) for name in cache_names()[::3] for where in (0.0, SINK / WINDOW, 0.5, 1.0)),
        ("cache.global_end", 0.0),
        ("latents", 0.5),
        ("decoder.memory", 1.0),
    ],
)
def test_one_wrong_bit_shows_in_the_film(network: Model, rolling: Rolling, name: str, where: float) -> None:
    arrays, host_state, film = rolling
    copies = elsewhere(arrays)
    flat = copies[name].reshape(-1).view(np.uint8)
    flat[int(where * (flat.size - 1))] ^= 1
    world = World(network, Size(2), copies)
    world.restore(host_state)
    assert any(play(world, 1) != [block] for block in film)


def test_no_wrong_bit_and_the_film_is_the_same(network: Model, rolling: Rolling) -> None:
    arrays, host_state, film = rolling
    world = World(network, Size(2), elsewhere(arrays))
    world.restore(host_state)
    assert play(world, FULL_AFTER) == film


def test_cache_rolls_by_its_stride_behind_the_sink(network: Model) -> None:
    size = Size(2)
    world, arrays = start(network, size)
    play(world, FULL_AFTER)
    assert arrays["cache.local_end"].tolist() == [size.rows] * LAYERS
    cache = arrays["layer01.v"].reshape(size.rows, -1)
    before = cache.copy()
    play(world, 1)
    sink, shift = SINK * size.frame_rows, size.block_rows
    assert np.array_equal(cache[:sink], before[:sink])
    assert np.array_equal(cache[sink:-shift], before[sink + shift :])
    assert not np.array_equal(cache[-shift:], before[-shift:])
    assert arrays["cache.local_end"].tolist() == [size.rows] * LAYERS
    assert arrays["cache.global_end"].tolist() == [size.block_rows * (FULL_AFTER + 1)] * LAYERS


def test_cache_rolls_without_a_second_copy(network: Model) -> None:
    size = Size.of_mb(160)
    world, _ = start(network, size)
    play(world, FULL_AFTER)
    tracemalloc.start()
    try:
        play(world, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size.rows * 256, "a block needed as much memory as one region"


def test_host_state_is_small_and_refused_when_foreign(network: Model) -> None:
    world, arrays = start(network)
    play(world, 5)
    assert len(world.host_state()) < HOST_STATE_BYTES
    for foreign in (b"", b"\xc0", b"\x91\x02", world.host_state()[:-1], b"\x99\x02" + world.host_state()[2:]):
        with pytest.raises(ValidationError, match="host state"):
            World(network, SMALL, arrays).restore(foreign)


def test_neither_begun_nor_restored_is_an_error(network: Model) -> None:
    with pytest.raises(ValidationError, match="neither begun nor"):
        World(network, SMALL, SMALL.allocate()).step(action(1).keys)


def test_wrong_arrays_are_refused_by_name(network: Model) -> None:
    arrays = SMALL.allocate()
    del arrays["latents"]
    with pytest.raises(ValidationError, match="'latents' is missing"):
        World(network, SMALL, arrays)
    with pytest.raises(ValidationError, match=r"layer00\.k"):
        World(network, SMALL, Size(2).allocate())


@pytest.mark.parametrize("state_mb", [16, 64, 256, 1024, 4096])
def test_sizes_are_what_was_asked_for_and_valid(state_mb: int) -> None:
    size = Size.of_mb(state_mb)
    described = manifest.Manifest("world", size.regions(), 100, 100)
    manifest.validate(described)
    assert abs(described.nbytes - state_mb * 1e6) < 1.2e6
    assert all(r.stride_bytes and r.stride_bytes % r.leaf_bytes == 0 for r in size.regions()[: 2 * LAYERS])


def test_the_player_is_a_pure_function_and_uses_every_key() -> None:
    assert [action(block) for block in range(1, 50)] == [action(block) for block in range(1, 50)]
    pressed = {key for block in range(1, 200) for key in action(block).keys}
    assert len(pressed) == 4
    assert action(1).keys == action(3).keys
