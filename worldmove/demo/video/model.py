"""A causal video transformer with random weights from a seed: latents out of noise and cached frames.

The order of the work is that of autoregressive video diffusion with a key/value cache: every pass writes its
tokens' keys and values into the cache behind the older frames and attends to all of them; text comes in by a
cross-attention whose keys and values are computed once. Keys are cached after their rotary code, so that a
cache that moves left keeps its bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.nn import functional

from worldmove.demo.video.shape import PATCH, Shape

_TIME_FEATURES = 256
_ROPE_BASE = 10000.0


class LayerCache(NamedTuple):
    """A layer's memory, written in place: `k`, `v` `[1, tokens, heads, head_dim]`; the text's `ck`, `cv`."""

    k: Tensor
    v: Tensor
    ck: Tensor
    cv: Tensor


class Span(NamedTuple):
    """Where a block's tokens go in the caches, how many are valid then, and its first frame's number."""

    first: int
    valid: int
    frame: int


class _Layer(NamedTuple):
    qkv: Tensor
    out: Tensor
    cross_q: Tensor
    cross_k: Tensor
    cross_v: Tensor
    cross_out: Tensor
    up: Tensor
    down: Tensor
    modulation: Tensor


class Network:
    """The weights, bfloat16 on one device; nothing of them is part of a session.

    Args:
        shape: sizes.
        device: where they are made and used.
        seed: of the weights.
    """

    def __init__(self, shape: Shape, device: torch.device, seed: int = 1) -> None:
        self.shape = shape
        self.device = device
        draw = torch.Generator(device).manual_seed(seed)

        def weights(outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
            drawn = torch.randn(outputs, inputs, generator=draw, device=device)
            return (drawn * (gain / math.sqrt(inputs))).to(torch.bfloat16)

        width, latent = shape.width, shape.channels * PATCH * PATCH
        self._patch = weights(width, latent)
        self._time = weights(6 * width, _TIME_FEATURES)
        self._action = weights(width, 8)
        self._text = weights(shape.text, width)
        self._head = weights(latent, width)
        self._layers = [
            _Layer(
                qkv=weights(3 * width, width),
                out=weights(width, width),
                cross_q=weights(width, width),
                cross_k=weights(width, width),
                cross_v=weights(width, width),
                cross_out=weights(width, width),
                up=weights(shape.ffn, width),
                down=weights(width, shape.ffn),
                modulation=weights(6, width, 0.5),
            )
            for _ in range(shape.layers)
        ]

    def digest(self) -> str:
        """XXH3-128 of all weights in their order: part of the fingerprint."""
        hasher = xxhash.xxh3_128()
        for tensor in (self._patch, self._time, self._action, self._text, self._head):
            hasher.update(tensor.view(torch.uint8).cpu().numpy())
        for layer in self._layers:
            for tensor in layer:
                hasher.update(tensor.view(torch.uint8).cpu().numpy())
        return hasher.hexdigest()

    def read_text(self, caches: list[LayerCache]) -> None:
        """Fills the cross-attention caches with the prompt's keys and values."""
        shape = (1, self.shape.text, self.shape.heads, self.shape.head_dim)
        for layer, cache in zip(self._layers, caches, strict=True):
            cache.ck.copy_((self._text @ layer.cross_k.T).view(shape))
            cache.cv.copy_((self._text @ layer.cross_v.T).view(shape))

    def forward(
        self, latents: Tensor, sigma: float, action: Tensor, span: Span, caches: list[LayerCache]
    ) -> Tensor:
        """One pass over one block; its keys and values are written into the caches.

        Args:
            latents: float32 `[block, channels, 2 * rows, 2 * columns]`.
            sigma: noise level; 0 for the clean pass.
            action: float32 `[8]`, the player's keys.
            span: where the block's tokens go, and when they are.
            caches: of all layers.

        Returns:
            The predicted flow, of the latents' shape.
        """
        hidden = self._patchify(latents) @ self._patch.T + action.to(torch.bfloat16) @ self._action.T
        time = functional.silu(_time_features(sigma, self.device)) @ self._time.T
        codes = rotary(self.shape, span.frame, self.device)
        for layer, cache in zip(self._layers, caches, strict=True):
            scale = time.view(6, -1) + layer.modulation
            hidden = (
                hidden
                + self._self_attention(_modulated(hidden, scale[0], scale[1]), layer, cache, span, codes)
                * scale[2]
            )
            hidden = hidden + self._cross_attention(_modulated(hidden), layer, cache)
            inner = functional.gelu(_modulated(hidden, scale[3], scale[4]) @ layer.up.T, approximate="tanh")
            hidden = hidden + (inner @ layer.down.T) * scale[5]
        return self._unpatchify(_modulated(hidden) @ self._head.T)

    def _self_attention(
        self, hidden: Tensor, layer: _Layer, cache: LayerCache, span: Span, codes: Tensor
    ) -> Tensor:
        tokens = hidden.shape[0]
        query, key, value = (hidden @ layer.qkv.T).view(tokens, 3, self.shape.heads, -1).unbind(1)
        cache.k[0, span.first : span.first + tokens] = _rotated(key, codes)
        cache.v[0, span.first : span.first + tokens] = value
        seen = _attend(_rotated(query, codes), cache.k[0, : span.valid], cache.v[0, : span.valid])
        return seen @ layer.out.T

    def _cross_attention(self, hidden: Tensor, layer: _Layer, cache: LayerCache) -> Tensor:
        query = (hidden @ layer.cross_q.T).view(hidden.shape[0], self.shape.heads, -1)
        return _attend(query, cache.ck[0], cache.cv[0]) @ layer.cross_out.T

    def _patchify(self, latents: Tensor) -> Tensor:
        s = self.shape
        cut = latents.to(torch.bfloat16).view(s.block, s.channels, s.rows, PATCH, s.columns, PATCH)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(s.block_tokens, -1)

    def _unpatchify(self, tokens: Tensor) -> Tensor:
        s = self.shape
        cut = tokens.float().view(s.block, s.rows, s.columns, s.channels, PATCH, PATCH)
        return cut.permute(0, 3, 1, 4, 2, 5).reshape(s.block, s.channels, s.rows * PATCH, s.columns * PATCH)


def rotary(shape: Shape, frame: int, device: torch.device) -> Tensor:
    """Rotary codes of one block's tokens: complex64 `[tokens, 1, head_dim / 2]`.

    Half of the pairs tell the frame, a quarter each the row and the column (the split of Wan 2.1, rounded).
    """
    pairs = shape.head_dim // 2
    parts = (pairs - 2 * (pairs // 4), pairs // 4, pairs // 4)
    places = torch.meshgrid(
        torch.arange(frame, frame + shape.block, device=device, dtype=torch.float32),
        torch.arange(shape.rows, device=device, dtype=torch.float32),
        torch.arange(shape.columns, device=device, dtype=torch.float32),
        indexing="ij",
    )
    angles = [
        place.reshape(-1, 1)
        * _ROPE_BASE ** (-torch.arange(count, device=device, dtype=torch.float32) / count)
        for place, count in zip(places, parts, strict=True)
    ]
    angle = torch.cat(angles, dim=1)
    return torch.polar(torch.ones_like(angle), angle).unsqueeze(1)


def _rotated(heads: Tensor, codes: Tensor) -> Tensor:
    """`[tokens, heads, head_dim]` turned by the codes, in float32, back to bfloat16."""
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * codes).flatten(-2).to(torch.bfloat16)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of `[tokens, heads, head_dim]` to as many keys and values as there are; `[tokens, width]`."""
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, keys, values))
    seen = functional.scaled_dot_product_attention(q, k, v)
    return seen.squeeze(0).transpose(0, 1).reshape(query.shape[0], -1)


def _modulated(hidden: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    normed = functional.layer_norm(hidden, hidden.shape[-1:])
    if shift is None or scale is None:
        return normed
    return normed * (1 + scale) + shift


def _time_features(sigma: float, device: torch.device) -> Tensor:
    half = _TIME_FEATURES // 2
    rates = torch.exp(torch.arange(half, device=device) * (-math.log(_ROPE_BASE) / half))
    angle = rates * (sigma * 1000.0)
    return torch.cat((angle.cos(), angle.sin())).to(torch.bfloat16)
