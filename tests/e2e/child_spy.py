# SPDX-License-Identifier: Apache-2.0
"""Which child's kernel ran, for each layer and step, and what the storage proof compared."""

import copy
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One forward of one layer: the impl that ran, and the requests' query lengths, sorted."""

    impl: str
    query_lens: list[int]


@dataclass
class Notes:
    """What the spies saw.

    Attributes:
        steps: by layer.
        compared: of each comparison by bytes how many of them were not zero, and the difference.
        attended: how often the proof attended over a cache instead.
    """

    steps: dict[str, list[Step]] = field(default_factory=lambda: defaultdict(list))
    compared: list[tuple[int, str | None]] = field(default_factory=list)
    attended: int = 0

    def take(self) -> "Notes":
        """What was seen since this was last called."""
        taken = copy.copy(self)
        vars(self).update(vars(Notes()))
        return taken


def watch(owner: Any, name: str, note: Callable[[dict[str, Any], Any], None]) -> None:
    """Have `note` told of each call's arguments, by name, and result, until the process ends."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        note(inspect.signature(real).bind(*args, **kwargs).arguments, result)
        return result

    setattr(owner, name, watched)


def spy(*impls: type) -> Notes:
    """Watch the forwards of `impls`, and the storage proof."""
    from vllm.v1.attention.backends import storage_proof

    notes = Notes()

    def note_step(call: dict[str, Any], _: Any) -> None:
        if (metadata := call["attn_metadata"]) is not None:
            lens = metadata.query_start_loc.diff().tolist()
            step = Step(type(call["self"]).__name__, sorted(lens))
            notes.steps[call["layer"].layer_name].append(step)

    def note_bytes(call: dict[str, Any], difference: str | None) -> None:
        notes.compared.append((int(call["written"].count_nonzero()), difference))

    def note_attended(*_: Any) -> None:
        notes.attended += 1

    for impl in impls:
        watch(impl, "forward", note_step)
    watch(storage_proof, "_first_different_byte", note_bytes)
    watch(storage_proof, "_reads_differently", note_attended)
    return notes
