"""Which ragged dots are one layer, for the report.

In: what `walk` found.  Out: a `Site` for each layer.  Ragged dots of the same group sizes are one layer, forward and
backward.  Backward ones in another body (of a backward scan, of a checkpoint) have group sizes of their own: they go
to the layer that is written on the same lines; where several are, as in an unrolled loop, to each its share, the last
layer first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from moe_xla.passes._jax import source_of
from moe_xla.passes.advice import advice_for
from moe_xla.passes.regroup.walk import Found
from moe_xla.passes.site import KEPT, REWRITTEN, Site

_Layer = list[Found]


def sites_of(found: Iterable[Found], pattern: str, semantics: str) -> tuple[Site, ...]:
    """The sites of a program, in its order; those that are rewritten compute what was written in any semantics."""
    return tuple(_site(layer, pattern, semantics) for layer in _layers(found))


def _layers(found: Iterable[Found]) -> list[_Layer]:
    by_sizes: dict[Any, _Layer] = {}
    for f in found:
        by_sizes.setdefault((f.sizes, f.reason), []).append(f)
    layers = [layer for layer in by_sizes.values() if any(map(_is_forward, layer))]
    shares = [0] * len(layers)
    for part in by_sizes.values():
        if any(map(_is_forward, part)):
            continue
        same = [i for i in reversed(range(len(shares))) if _lines(layers[i]) & _lines(part)]
        if not same:
            layers.append(part)
            continue
        owner = min(same, key=shares.__getitem__)
        shares[owner] += 1
        layers[owner] = [*layers[owner], *part]
    return layers


def _is_forward(found: Found) -> bool:
    product = found.product
    return not found.is_recomputed and (product is None or not (product.is_outer or product.transpose_w))


def _lines(layer: Sequence[Found]) -> set[Any]:
    """Where the products of a layer are written, and why they stay."""
    return {(source_of(f.eqn), f.reason) for f in layer}


def _site(layer: Sequence[Found], pattern: str, semantics: str) -> Site:
    first = layer[0]
    kept = first.reason is not None
    products = [(f.times, f.product, f.eqn.invars[0].aval.dtype.itemsize) for f in layer if f.product is not None]
    return Site(
        status=KEPT if kept else REWRITTEN,
        pattern=pattern,
        semantics=None if kept else semantics,
        source=source_of(first.eqn),
        reason=first.reason,
        primitive=first.eqn.primitive.name if kept else None,
        reason_source=source_of(first.eqn) if kept else None,
        advice=advice_for(first.reason),
        tokens=max((p.rows for _, p, _ in products), default=0),
        experts=max((p.experts for _, p, _ in products), default=0),
        choices=1 if products else 0,
        backend=None if kept else ", ".join(sorted({f.backend for f in layer if f.backend is not None})),
        useful_flops=0 if kept else sum(times * p.flops for times, p, _ in products),
        naive_flops=sum(times * p.experts * p.flops for times, p, _ in products),
        removed_bytes=0 if kept else sum(p.copied * size for _, p, size in products),
    )
