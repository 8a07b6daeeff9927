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

from vllm.plugins.composite_attention.selection import member, spelled
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
    if value.strip().lower() in ("", "auto"):
        return None
    name = _name_of(value)
    if "__" not in name:
        return AttentionBackendEnum[name]
    class_of(value)
    return member(name, f"{__name__}.{name}")


def class_of(value: str) -> type[AttentionBackend]:
    """The backend class that `value` names, in any form but `auto`; nothing is registered.

    Raises:
        ValueError: as `backend_for`; or the backend's module fails, in whatever way.
    """
    name = _name_of(value)
    try:
        return _create(name) if "__" in name else AttentionBackendEnum[name].get_class()
    except ValueError:
        raise
    except Exception as error:
        what = f"{value.strip()!r} cannot be joined" if "__" in name else f"{name} cannot be loaded"
        raise ValueError(
            f"{what}: {str(error).rstrip('.')}. Install what is missing, or name other backends."
        ) from error


def is_pair(value: str) -> bool:
    """Whether `value` names two children."""
    return "+" in value or "=" in value


def _name_of(value: str) -> str:
    """A registry name as it is written there, or the name of a pair's class in this module."""
    if "+" not in value and "=" not in value:
        value = spelled(value.strip())  # as the enum's member is named
    pattern, children = "{}__{}", value.split("+")
    if "=" in value:
        phases = dict(part.split("=", 1) for part in value.split(",") if "=" in part)
        names = {phase.strip().lower(): name for phase, name in phases.items()}
        if set(names) != {"prefill", "decode"} or value.count(",") != 1:
            raise ValueError(
                f"{value!r} names no pair of phases: it must read prefill=NAME,decode=NAME."
            )
        pattern, children = "PREFILL__{}__DECODE__{}", [names["prefill"], names["decode"]]
    if len(children) > 2:
        raise ValueError(f"{value!r} names no pair: it must read GENERAL+CAUSAL.")
    known = list(map(_registered, children))
    return known[0] if len(set(known)) == 1 else pattern.format(*known)


def _registered(name: str) -> str:
    if name.strip().lower() in ("", "auto"):
        what = f"{name.strip()!r} is no child" if name.strip() else "A child's name is missing"
        raise ValueError(f"{what}: name two registered backends, such as TRITON_ATTN+FLASH_ATTN.")
    # Pairs are no children: their names could not be told from their children's.
    names = (name for name in AttentionBackendEnum.__members__ if "__" not in name)
    known = {name.lower(): name for name in names}
    if name.strip().lower() in known:
        return known[name.strip().lower()]
    nearest = difflib.get_close_matches(name.strip().lower(), known, n=3, cutoff=0.4)
    hint = " or ".join(known[match] for match in nearest) or ", ".join(known.values())
    raise ValueError(f"There is no attention backend {name.strip()!r}. Did you mean {hint}?")


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
