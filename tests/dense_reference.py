"""The image mask and attention over it, dense and in float64, written for reading.

Independent of the code under test: every expected mask and output of the unit tests comes from
here.
"""

from collections.abc import Sequence

import torch


def image_mask(
    seq_len: int,
    images: Sequence[tuple[int, int]] = (),
    *,
    window: int | None = None,
    clamped: bool = True,
) -> torch.Tensor:
    """(seq_len, seq_len) bool: may the query at row q see the key at column k.

    Causal, within the last `window` keys, or in the same image; `clamped` bounds the past of
    the latter by the window too. Images are inclusive `(start, stop)`; one with
    `start >= stop` does not count.
    """
    q = torch.arange(seq_len)[:, None]
    k = torch.arange(seq_len)[None, :]
    recent = torch.ones(seq_len, seq_len, dtype=torch.bool) if window is None else k > q - window
    same_image = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    for start, stop in images:
        if start < stop:
            same_image |= (start <= q) & (q <= stop) & (start <= k) & (k <= stop)
    if clamped:
        same_image &= recent
    return ((k <= q) & recent) | same_image


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    *,
    soft_cap: float = 0.0,
    alibi_slopes: Sequence[float] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """(queries, heads, head_size) float64: attention of the *last* positions of a sequence.

    Args:
        query: (queries, heads, head_size).
        key: (seq_len, kv_heads, head_size), and `value` alike.
        mask: (seq_len, seq_len), of which the last rows are used.
        scale: factor on query . key.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`, if not 0.
        alibi_slopes: per head, times the distance from query to key.
        sinks: (heads,) a logit per head that takes part in the softmax and has no value.
    """
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    rows = slice(len(key) - len(query), None)
    if alibi_slopes is not None:
        position = torch.arange(len(key), dtype=torch.float64)
        distance = position[None, :] - position[rows, None]
        scores = scores + torch.tensor(alibi_slopes, dtype=torch.float64)[:, None, None] * distance
    scores = scores.masked_fill(~mask[rows], -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)
