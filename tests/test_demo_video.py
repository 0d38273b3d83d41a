"""The video world on a CPU, small: shapes, bits, and what a block does to the caches."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from worldmove.demo.player import action
from worldmove.demo.video.shape import SELF_FORCING, SMALL, Shape
from worldmove.errors import ConfigError

torch = pytest.importorskip("torch", reason="torch is not installed")

from worldmove.demo.video.model import Network  # noqa: E402
from worldmove.demo.video.world import State, VideoWorld, new_state, state_digest  # noqa: E402

CPU = torch.device("cpu")


def run(shape: Shape, blocks: int, state: State | None = None) -> tuple[State, list[bytes]]:
    state = new_state(shape, CPU, 7) if state is None else state
    world = VideoWorld(Network(shape, CPU), state)
    first = world.block + 1
    return state, [world.step(action(block).keys).tobytes() for block in range(first, first + blocks)]


def test_the_published_shape_has_the_published_bytes() -> None:
    assert SELF_FORCING.cache == (1, 32760, 12, 128)
    assert 2 * SELF_FORCING.layers * math.prod(SELF_FORCING.cache) * 2 == 6_038_323_200
    assert SELF_FORCING.stride_bytes == 3 * 1560 * 12 * 128 * 2


@pytest.mark.parametrize("changed", [{"window": 8}, {"sink": 2}, {"sink": 9}, {"head_dim": 12}])
def test_sizes_that_do_not_fit_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(SMALL, **changed)


def test_two_worlds_with_one_seed_are_one_world() -> None:
    (mine, film), (theirs, other) = run(SMALL, 5), run(SMALL, 5)
    assert film == other
    assert state_digest(mine) == state_digest(theirs)
    assert len(set(film)) == 5
    assert len(film[0]) == 12 * 72 * 128 * 3


def test_a_state_is_digested_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    state, _ = run(SMALL, 1)
    whole = state_digest(state)
    monkeypatch.setattr("worldmove.demo.video.world.ROOM_BYTES", 1000)
    assert state_digest(state) == whole
    assert state_digest({"one": torch.arange(3), "none": torch.empty(0)}) == xxhash.xxh3_128_hexdigest(
        np.arange(3).tobytes()
    )


@pytest.mark.parametrize("part", ["k", "v", "ck", "latents", "decoder", "rng", "actions"])
def test_every_part_of_the_state_is_seen_in_the_pictures(part: str) -> None:
    state, _ = run(SMALL, 4)
    same, _ = run(SMALL, 4)
    match part:
        case "k" | "v" | "ck":
            state["layers"][-1][part].add_(1)
        case "rng":
            state["rng"].manual_seed(8)
        case "actions":
            state["actions"] = [15] * 8
        case _:
            state[part].add_(1)
    assert run(SMALL, 1, state)[1] != run(SMALL, 1, same)[1]


def test_a_full_cache_moves_left_by_a_block() -> None:
    state, _ = run(SMALL, 3)
    before = state["layers"][1]["k"].clone()
    run(SMALL, 1, state)
    after = state["layers"][1]["k"]
    n = SMALL.block_tokens
    assert torch.equal(after[:, :-n], before[:, n:])
    assert not torch.equal(after[:, -n:], before[:, -n:])


def test_a_sink_stays() -> None:
    shape = dataclasses.replace(SMALL, sink=3)
    state, _ = run(shape, 3)
    before = state["layers"][0]["v"].clone()
    run(shape, 2, state)
    kept, n = 3 * shape.frame_tokens, 2 * shape.block_tokens
    after = state["layers"][0]["v"]
    assert torch.equal(after[:, :kept], before[:, :kept])
    assert torch.equal(after[:, kept:-n], before[:, kept + n :])


def test_a_ring_overwrites_its_oldest_block_in_place() -> None:
    shape = dataclasses.replace(SMALL, ring=True, sink=3)
    state, _ = run(shape, 3)
    before = state["layers"][0]["k"].clone()
    run(shape, 1, state)
    after = state["layers"][0]["k"]
    changed = [
        not torch.equal(a, b) for a, b in zip(after.chunk(3, dim=1), before.chunk(3, dim=1), strict=True)
    ]
    assert changed == [False, True, False]


def test_pictures_have_the_demos_format() -> None:
    world = VideoWorld(Network(SMALL, CPU), new_state(SMALL, CPU, 7))
    pictures = world.step(action(1).keys)
    assert pictures.shape == (12, 72, 128, 3)
    assert pictures.dtype == np.uint8
    assert pictures.std() > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache",
    [(), ("--sink", "3", "--block-ms", "100"), ("--ring", "--sink", "3")],
    ids=["rolls", "sink", "ring"],
)
def test_it_moves_between_nodes_and_every_picture_and_state_is_the_twins(
    tmp_path: Path, cache: tuple[str, ...]
) -> None:
    command = (sys.executable, "-m", "worldmove", "demo", "--video", "small", "--moves", "2", "--json")
    done = subprocess.run(
        (*command, *cache, "--out", str(tmp_path)), capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["frames_equal"] == found["frames_compared"] > 9 * 12
    assert found["states_equal"] == found["states_compared"] == 2


def test_a_shape_has_its_size(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "worldmove", "demo", "--video", "small", "--state-mb", "64")
    done = subprocess.run(
        (*command, "--out", str(tmp_path)), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode != 0
    assert "state_mb is 64" in done.stderr
