# SPDX-License-Identifier: Apache-2.0
"""Composites of any two registered backends, made on demand under names that any process of the
engine resolves to the same class.

`GENERAL__CAUSAL` joins two registry names with the image-mask policy, `PREFILL__P__DECODE__D` with
the prefill/decode policy. Both are attributes of this module, so that a class path, an enum member
and a pickle of the class work wherever this module can be imported.
"""

import difflib
import re
from typing import Any, NamedTuple

from vllm.plugins.composite_attention.selection import PAIRS, member
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.composite import (
    MMPrefixAttentionRouting,
    PrefillDecodeAttentionRouting,
    create_composite_attention_backend,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

MASKED, PHASES = "{}__{}", "PREFILL__{}__DECODE__{}"
"""The names of pairs' classes."""


class _Pair(NamedTuple):
    """What the name of a pair's class says."""

    routing: Any
    general: str
    causal: str
    spelled: str


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
    if name in _singles():
        return AttentionBackendEnum[name]
    class_of(value)
    return member(name, f"{PAIRS}.{name}")


def class_of(value: str) -> type[AttentionBackend]:
    """The backend class that `value` names, in any form but `auto`; nothing is registered.

    Raises:
        ValueError: as `backend_for`; or the backend's module fails, in whatever way.
    """
    name = _name_of(value)
    return _loaded(name) if name in _singles() else _create(name)


def is_pair(value: str) -> bool:
    """Whether `value` names two children."""
    return "+" in value or "=" in value


def spelled(name: str) -> str:
    """A backend's registry name as `VLLM_ATTENTION_BACKEND` takes it."""
    pair = None if name in _singles() else _pair_of(name)
    return name if pair is None else pair.spelled


def _singles() -> dict[str, AttentionBackendEnum]:
    """The registered backends but the pairs made here. Those are no children: their names could
    not be told from their children's."""
    members = AttentionBackendEnum.__members__.items()
    return {name: backend for name, backend in members if not is_made_here(backend)}


def is_made_here(backend: AttentionBackendEnum) -> bool:
    """Whether a registered backend is a pair of this module."""
    return str(backend.value).startswith(f"{PAIRS}.")


def _name_of(value: str) -> str:
    """A registry name as it is written there, or the name of a pair's class in this module."""
    if not is_pair(value):
        name = value.strip().upper()
        if name in _singles() or (pair := _pair_of(name)) is None:
            return _registered(value)
        value = pair.spelled  # as the enum's member is named
    pattern, children = MASKED, value.split("+")
    if "=" in value:
        phases = dict(part.split("=", 1) for part in value.split(",") if "=" in part)
        names = {phase.strip().lower(): name for phase, name in phases.items()}
        if set(names) != {"prefill", "decode"} or value.count(",") != 1:
            raise ValueError(
                f"{value!r} names no pair of phases: it must read prefill=NAME,decode=NAME."
            )
        pattern, children = PHASES, [names["prefill"], names["decode"]]
    if len(children) > 2:
        raise ValueError(f"{value!r} names no pair: it must read GENERAL+CAUSAL.")
    known = list(map(_registered, children))
    return known[0] if len(set(known)) == 1 else pattern.format(*known)


def _pair_of(name: str) -> _Pair | None:
    """The pair whose class has this name, if any; of two registered children, where its halves can
    be such."""
    phases = re.fullmatch(r"PREFILL__(.+?)__DECODE__(.+)", name)
    if phases is not None:
        prefill, decode = phases.groups()
        text = f"prefill={prefill},decode={decode}"
        return _Pair(PrefillDecodeAttentionRouting, prefill, decode, text)
    halves = [(name[: at.start()], name[at.start() + 2 :]) for at in re.finditer("(?=__)", name)]
    halves = [half for half in halves if all(half)]
    known = [half for half in halves if set(half) <= set(_singles())]
    for general, causal in known or halves:
        return _Pair(MMPrefixAttentionRouting, general, causal, f"{general}+{causal}")
    return None


def _registered(name: str) -> str:
    if name.strip().lower() in ("", "auto"):
        what = f"{name.strip()!r} is no child" if name.strip() else "A child's name is missing"
        raise ValueError(f"{what}: name two registered backends, such as TRITON_ATTN+FLASH_ATTN.")
    known = {name.lower(): name for name in _singles()}
    if name.strip().lower() in known:
        return known[name.strip().lower()]
    nearest = difflib.get_close_matches(name.strip().lower(), known, n=3, cutoff=0.4)
    hint = " or ".join(known[match] for match in nearest) or ", ".join(known.values())
    raise ValueError(f"There is no attention backend {name.strip()!r}. Did you mean {hint}?")


def _loaded(name: str) -> type[AttentionBackend]:
    try:
        return AttentionBackendEnum[name].get_class()
    except Exception as error:  # whatever the module of a backend raises
        said = str(error).rstrip(".")
        hint = "Install what is missing, or name" if isinstance(error, ImportError) else "Name"
        raise ValueError(f"{name} cannot be loaded: {said}. {hint} another backend.") from error


def _create(name: str) -> type[AttentionBackend]:
    pair = _pair_of(name)
    if pair is None:
        raise ValueError(f"{name!r} names no pair.")
    return create_composite_attention_backend(
        _loaded(_registered(pair.general)),
        _loaded(_registered(pair.causal)),
        name=name,
        backend_name=name,
        module=PAIRS,
        routing_policy=pair.routing,
    )


def __getattr__(name: str) -> type[AttentionBackend]:
    if not name.startswith("_"):
        try:
            return _create(name)
        except ValueError as error:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}: {error}"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
