"""The reference world: a running state with the shape of a real one, on whatever arrays it is given.

Per layer a rolling key and value cache in bfloat16, window and sink as in published models: frames of
the sink stay, the rest moves left by one block at every block, so that nearly every byte changes its
place. Beside it: cache indices, latent history and the decoder's memory (regions), and in the host state
the noise stream, the camera, and the keys that the player pressed lately.

Every latent token is kept at `repeats` sub-positions, each modulated by its own positional code. That
scales the state from 16 MB to 4 GB while the computing stays that of one small model; attention reads
one sub-position per token, another one at each block.

The noise of a block is drawn from a stream that is keyed with a digest of what is about to leave the
window, of the sink, and of the small regions. A real model has no such thing. Here it makes the film a
witness: one wrong bit anywhere in the state becomes another film, at the latest when it leaves the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from worldmove.demo import frames, model
from worldmove.demo.frames import BLOCK_FRAMES, FRAMES_PER_LATENT, Pixels
from worldmove.demo.model import BLOCK_LATENTS, BLOCK_TOKENS, LAYERS, TOKENS, WIDTH, Context, Floats, Model
from worldmove.demo.player import KEYS, Key
from worldmove.errors import ValidationError
from worldmove.manifest import Region, numpy_dtype

WINDOW = 21
"""Latent frames that the cache holds."""
SINK = 3
"""Of these, the first ones, which never leave."""
KEPT_KEYS = 3
"""How many blocks of the player's keys the world remembers, and feels."""
HOST_STATE_BYTES = 4096
FULL_AFTER = WINDOW // BLOCK_LATENTS
"""Blocks until the window is full; from the next one on the cache rolls."""

_REPEAT_BYTES = LAYERS * 2 * WINDOW * TOKENS * WIDTH * 2
_CHUNK = 1 << 17

Array = npt.NDArray[Any]


class HostState(msgspec.Struct, frozen=True, array_like=True):
    """What lies beside the tensors; msgpack on the wire. Lengths are bounded by their makers."""

    version: int
    block: int
    noise_seed: int
    noise_offset: int
    travel: float
    speed: float
    altitude: float
    climb: float
    keys: list[int]


class Size(NamedTuple):
    """How large a world is: `repeats` sub-positions per latent token."""

    repeats: int

    @classmethod
    def of_mb(cls, state_mb: float) -> Size:
        """The size nearest to `state_mb` megabytes (10⁶ bytes); about 2 MB is the smallest."""
        return cls(max(1, round(state_mb * 1e6 / _REPEAT_BYTES)))

    @property
    def frame_rows(self) -> int:
        """Cache rows of one latent frame."""
        return TOKENS * self.repeats

    @property
    def block_rows(self) -> int:
        """Cache rows of one block: what the cache moves by."""
        return BLOCK_TOKENS * self.repeats

    @property
    def rows(self) -> int:
        """Cache rows of the window."""
        return WINDOW * self.frame_rows

    def regions(self) -> tuple[Region, ...]:
        """The world's regions, all on the host and of rank 0."""
        shape = (1, self.rows, model.HEADS, model.HEAD_DIM)
        caches = tuple(
            Region(name, "bfloat16", shape, stride_bytes=self.block_rows * WIDTH * 2)
            for name in cache_names()
        )
        latent = TOKENS * model.CHANNELS
        return (
            *caches,
            Region("cache.global_end", "int64", (LAYERS,)),
            Region("cache.local_end", "int64", (LAYERS,)),
            Region("latents", "float32", (WINDOW, latent), stride_bytes=BLOCK_LATENTS * latent * 4),
            Region("decoder.memory", "float32", frames.MEMORY_SHAPE),
        )

    def allocate(self) -> dict[str, Array]:
        """Plain zeroed arrays for a world that lives in this process alone."""
        return {region.name: np.zeros(region.shape, numpy_dtype(region.dtype)) for region in self.regions()}


def cache_names() -> list[str]:
    """Names of the cache regions, layer by layer."""
    return [f"layer{layer:02}.{kind}" for layer in range(LAYERS) for kind in ("k", "v")]


class World:
    """One running world over `arrays`, which it changes in place and never replaces.

    Raises:
        ValidationError: an array is missing, or has another shape or type than its region.
    """

    def __init__(self, network: Model, size: Size, arrays: Mapping[str, Array]) -> None:
        _check(size, arrays)
        self._model = network
        self._size = size
        self._caches = [(arrays[f"layer{n:02}.k"], arrays[f"layer{n:02}.v"]) for n in range(LAYERS)]
        self._global_end = arrays["cache.global_end"]
        self._local_end = arrays["cache.local_end"]
        self._latents = arrays["latents"]
        self._memory = arrays["decoder.memory"]
        self._codes = _codes(size.repeats)
        self._state: HostState | None = None

    def begin(self, seed: int) -> None:
        """Starts a new world; `seed` (64 bit) is its noise stream. The cache itself may hold anything."""
        for array in (self._global_end, self._local_end, self._latents, self._memory):
            array[...] = 0
        self._state = HostState(1, 0, seed, 0, 0.0, 1.0, 0.0, 0.0, [])

    def restore(self, host_state: bytes) -> None:
        """Goes on from the arrays as they are, with the host state that belongs to them.

        Raises:
            ValidationError: the bytes are not a host state of this version.
        """
        try:
            state = msgspec.msgpack.decode(host_state, type=HostState)
        except msgspec.MsgspecError as error:
            raise ValidationError(f"host state cannot be read: {error}", field="host_state") from error
        if state.version != 1:
            raise ValidationError(f"host state has version {state.version}; 1 is allowed", field="host_state")
        self._state = state

    def host_state(self) -> bytes:
        """The host state after the last block."""
        return msgspec.msgpack.encode(self._now)

    @property
    def block(self) -> int:
        """Number of the last generated block; 0 before the first."""
        return self._now.block

    @property
    def _now(self) -> HostState:
        if self._state is None:
            raise ValidationError("the world has neither begun nor been restored", field="host_state")
        return self._state

    def step(self, keys: Key) -> Pixels:
        """Generates the next block under the player's `keys`.

        Returns:
            `uint8[BLOCK_FRAMES, height, width, 3]`.
        """
        old = self._now
        noise = self._noise(old)
        state, views = _fly(old, keys)
        places = np.array(
            [view[:2] for view in views[FRAMES_PER_LATENT - 1 :: FRAMES_PER_LATENT]], dtype=np.float32
        )
        pressed = np.array([[bool(held & key) for key in KEYS] for held in state.keys], dtype=np.float32)
        latents, rows = self._model.denoise(noise, pressed.mean(axis=0), places, self._contexts(state.block))
        self._make_room()
        for (keys_cache, values_cache), own in zip(self._caches, rows, strict=True):
            self._append(keys_cache, own.keys)
            self._append(values_cache, own.values)
        self._local_end += self._size.block_rows
        self._global_end += self._size.block_rows
        self._latents[:-BLOCK_LATENTS] = self._latents[BLOCK_LATENTS:].copy()
        self._latents[-BLOCK_LATENTS:] = latents.reshape(BLOCK_LATENTS, -1)
        self._state = state
        return frames.decode(latents, self._memory, views)

    def _noise(self, state: HostState) -> Floats:
        witness = state.noise_offset
        for part in self._leaving():
            witness = xxhash.xxh3_64_intdigest(part, seed=witness)
        key = np.array([state.noise_seed, witness], dtype=np.uint64)
        draw = np.random.Generator(np.random.Philox(key=key, counter=state.noise_offset))
        shape = (len(model.LEVELS), BLOCK_TOKENS, model.CHANNELS)
        return draw.standard_normal(shape, dtype=np.float32)

    def _leaving(self) -> list[memoryview]:
        """Everything that the noise depends on: the sink, the rows that go next, the small regions."""
        small = (self._local_end, self._global_end, self._latents, self._memory)
        parts = [_memory(array) for array in small]
        if self._full:
            stop = (SINK + BLOCK_LATENTS) * self._size.frame_rows * WIDTH * 2
            parts += [_memory(cache)[:stop] for pair in self._caches for cache in pair]
        return parts

    @property
    def _full(self) -> bool:
        return int(self._local_end[0]) >= self._size.rows

    def _contexts(self, block: int) -> list[Context]:
        """One sub-position of every token in the window, in every layer."""
        repeats = self._size.repeats
        tokens = np.arange(int(self._local_end[0]) // repeats)
        picked = tokens * repeats + (block * 7 + tokens * 5) % repeats
        return [
            Context.of(_widen(_rows(keys)[picked]), _widen(_rows(values)[picked]))
            for keys, values in self._caches
        ]

    def _make_room(self) -> None:
        """Rolls every cache left by one block, behind the sink, once the window is full."""
        if not self._full:
            return
        row = WIDTH * 2
        start = SINK * self._size.frame_rows * row
        shift = self._size.block_rows * row
        for pair in self._caches:
            for cache in pair:
                flat = _memory(cache)
                flat[start:-shift] = flat[start + shift :]
        self._local_end -= self._size.block_rows

    def _append(self, cache: Array, rows: Floats) -> None:
        """Writes a block's rows behind the cache's end, each token at all of its sub-positions."""
        repeats = self._size.repeats
        first = int(self._local_end[0])
        target = _rows(cache)[first : first + self._size.block_rows].reshape(BLOCK_TOKENS, repeats, WIDTH)
        step = max(1, _CHUNK // (repeats * WIDTH))
        buffer = np.empty((step, repeats, WIDTH), dtype=np.float32)
        for start in range(0, BLOCK_TOKENS, step):
            part = rows[start : start + step, None]
            wide = buffer[: len(part)]
            np.multiply(part, self._codes, out=wide)
            # bfloat16 is the upper half of float32; the lower half is cut off.
            np.right_shift(wide.view(np.uint32), 16, out=target[start : start + len(part)], casting="unsafe")


def _check(size: Size, arrays: Mapping[str, Array]) -> None:
    for region in size.regions():
        array = arrays.get(region.name)
        wanted = numpy_dtype(region.dtype)
        if array is None:
            raise ValidationError(f"array {region.name!r} is missing", field=region.name)
        if array.shape != region.shape or array.dtype != wanted or not array.flags.c_contiguous:
            raise ValidationError(
                f"array {region.name!r} is {array.dtype} {list(array.shape)}; "
                f"{wanted} {list(region.shape)}, contiguous, is needed",
                field=region.name,
            )


def _fly(old: HostState, keys: Key) -> tuple[HostState, list[frames.View]]:
    """Moves the camera through one block; returns the state after it and one view per picture."""
    speed, climb, travel, altitude = old.speed, old.climb, old.travel, old.altitude
    throttle = 1.6 if keys & Key.FASTER else 0.5 if keys & Key.SLOWER else 1.0
    pull = 1.0 if keys & Key.CLIMB else -1.0 if keys & Key.DIVE else 0.0
    views = []
    for picture in range(1, BLOCK_FRAMES + 1):
        speed += 0.08 * (throttle - speed)
        climb += 0.10 * (pull - climb)
        travel += 0.008 * speed
        altitude = 0.985 * altitude + 0.015 * climb
        views.append(frames.View(travel, altitude, -0.5 * climb, old.block * BLOCK_FRAMES + picture))
    state = HostState(
        version=1,
        block=old.block + 1,
        noise_seed=old.noise_seed,
        noise_offset=old.noise_offset + len(model.LEVELS) * BLOCK_TOKENS * model.CHANNELS,
        travel=travel,
        speed=speed,
        altitude=altitude,
        climb=climb,
        keys=[*old.keys, int(keys)][-KEPT_KEYS:],
    )
    return state, views


def _codes(repeats: int) -> Floats:
    """Positional codes of the sub-positions, `[repeats, WIDTH]`, all near 1."""
    angle = np.outer(np.arange(repeats), 1.0 / 50.0 ** (np.arange(WIDTH) / WIDTH))
    return (1.0 + 0.1 * np.cos(2 * math.pi * angle / max(repeats, 2))).astype(np.float32)


def _rows(cache: Array) -> Array:
    return cache.reshape(-1, WIDTH)


def _memory(array: Array) -> memoryview:
    """All bytes of a contiguous array; assigning slices of it moves memory, overlapping or not."""
    return memoryview(array.reshape(-1).view(np.uint8).data)


def _widen(rows: Array) -> Floats:
    """bfloat16 bits to float32."""
    return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
