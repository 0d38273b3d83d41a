"""What only the serving stack knows, under names that all stacks share."""

from __future__ import annotations

from worldmove.errors import ValidationError


def stack_fields(
    *,
    attention: str | None = None,
    scheduler: str | None = None,
    resolution: tuple[int, int] | str | None = None,
    cache_layout: str | None = None,
    batch: int | None = None,
    tensor_parallel: int | None = None,
    sequence_parallel: int | None = None,
    precision: str | None = None,
    **more: str | int,
) -> dict[str, str]:
    """Fields for `extra` of `collect`; those that are left out are not part of it.

    Args:
        attention: backend with everything that chooses its kernel (`flash-attn 2.8 num_splits=1`).
        scheduler: of the denoising steps, with its settings.
        resolution: height and width of the frames.
        cache_layout: how caches are laid out (`B,S,H,D rolling 21 frames, sink 3`).
        batch: worlds in one forward pass.
        tensor_parallel: ranks that share a layer.
        sequence_parallel: ranks that share a sequence.
        precision: of weights and activations.
        more: anything else, as `stack.NAME`.

    Raises:
        ValidationError: a number is below 1.
    """
    numbers = {"batch": batch, "tensor_parallel": tensor_parallel, "sequence_parallel": sequence_parallel}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValidationError(f"{name} is {value}; 1 or more is allowed", field=name)
    size = resolution if resolution is None or isinstance(resolution, str) else "x".join(map(str, resolution))
    given = {
        "attention": attention,
        "scheduler": scheduler,
        "resolution": size,
        "cache_layout": cache_layout,
        "precision": precision,
        **numbers,
        **more,
    }
    return {f"stack.{name}": str(value) for name, value in given.items() if value is not None}
