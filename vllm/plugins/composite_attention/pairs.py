# SPDX-License-Identifier: Apache-2.0
"""Composites of any two registered backends, made on demand under names that any process of the
engine resolves to the same class.

`GENERAL__CAUSAL` joins two registry names with the image-mask policy, `PREFILL__P__DECODE__D` with
the prefill/decode policy. Both are attributes of this module, so that a class path, an enum member
and a pickle of the class work wherever this module can be imported.
"""

import difflib
import re
from typing import Any

from vllm.plugins.composite_attention.selection import member
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.composite import (
    MMPrefixAttentionRouting,
    PrefillDecodeAttentionRouting,
    create_composite_attention_backend,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

_PHASES = re.compile(r"PREFILL__(\w+?)__DECODE__(\w+)")
_MASKED = re.compile(r"(\w+?)__(\w+)")


def backend_for(value: str) -> AttentionBackendEnum | None:
    """The backend that `value` asks for, registered if it is a pair; None for `auto` and empty.

    Args:
        value: `auto`; a registry name; `GENERAL+CAUSAL`, image masks on the first and the rest on
            the second; or `prefill=NAME,decode=NAME`. Case does not matter.

    Raises:
        ValueError: a name that is not registered, a pair that cannot be composed, or another form.
    """
    value = value.strip()
    if value.lower() in ("", "auto"):
        return None
    if "=" in value:
        phases = dict(part.split("=", 1) for part in value.split(",") if "=" in part)
        names = {phase.strip().lower(): name for phase, name in phases.items()}
        if set(names) != {"prefill", "decode"} or value.count(",") != 1:
            raise ValueError(
                f"{value!r} names no pair of phases: it must read prefill=NAME,decode=NAME."
            )
        return _registered("PREFILL__{}__DECODE__{}", names["prefill"], names["decode"])
    if "+" in value:
        children = value.split("+")
        if len(children) != 2:
            raise ValueError(f"{value!r} names no pair: it must read GENERAL+CAUSAL.")
        return _registered("{}__{}", *children)
    return _member(value)


def _member(name: str) -> AttentionBackendEnum:
    # Pairs are no children: their names could not be told from their children's.
    names = (name for name in AttentionBackendEnum.__members__ if "__" not in name)
    known = {name.lower(): name for name in names}
    if name.strip().lower() in known:
        return AttentionBackendEnum[known[name.strip().lower()]]
    nearest = difflib.get_close_matches(name.strip().lower(), known, n=3, cutoff=0.4)
    hint = " or ".join(known[match] for match in nearest) or ", ".join(known.values())
    raise ValueError(f"There is no attention backend {name.strip()!r}. Did you mean {hint}?")


def _registered(pattern: str, first: str, second: str) -> AttentionBackendEnum:
    children = _member(first), _member(second)
    if children[0] is children[1]:
        return children[0]
    name = pattern.format(*(child.name for child in children))
    try:
        _create(name)
    except ImportError as error:
        raise ValueError(
            f"{first.strip()} and {second.strip()} cannot be joined: {error}. Install what is "
            "missing, or name other backends."
        ) from error
    return member(name, f"{__name__}.{name}")


def _create(name: str) -> type[AttentionBackend]:
    routing: Any = PrefillDecodeAttentionRouting
    match = _PHASES.fullmatch(name)
    if match is None:
        routing, match = MMPrefixAttentionRouting, _MASKED.fullmatch(name)
    if match is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    general, causal = (AttentionBackendEnum[child].get_class() for child in match.groups())
    return create_composite_attention_backend(
        general, causal, name=name, backend_name=name, module=__name__, routing_policy=routing
    )


def __getattr__(name: str) -> type[AttentionBackend]:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _create(name)
