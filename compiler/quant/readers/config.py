"""Accessors of quantization configs, for all formats' spellings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmc.errors import LlmcError


def group_sizes(config: Mapping[str, Any]) -> frozenset[int]:
    """All group sizes in a config: the default, those of layer groups, and of single layers."""
    rules = config.get("dynamic")
    places = [config, *map(weights_of, config_groups(config)), *layers_of(config),
              *(rules.values() if isinstance(rules, Mapping) else ())]
    named = [place.get(name) for place in places if isinstance(place, Mapping)
             for name in ("group_size", "q_group_size")]
    return frozenset(size for size in named if isinstance(size, int) and size > 0)


def config_groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config_groups of compressed-tensors, each the scheme of some layers."""
    groups = config.get("config_groups")
    return [group for group in groups.values() if isinstance(group, Mapping)] \
        if isinstance(groups, Mapping) else []


def weights_of(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """The scheme of weights of a config group."""
    found = group.get("weights")
    return found if isinstance(found, Mapping) else {}


def layers_of(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """AutoRound's extra_config: the schemes of single layers."""
    layers = config.get("extra_config")
    return [layer for layer in layers.values() if isinstance(layer, Mapping)] \
        if isinstance(layers, Mapping) else []


def bits_of(config: Mapping[str, Any], *names: str) -> int | None:
    """Bits of a code; None unless 4 or 8."""
    bits = next((config[name] for name in names if name in config), 4)
    return bits if bits in (4, 8) else None


def fits(pattern: str, module: str, place: str = "targets", match: Any = re.match) -> bool:
    """Whether a pattern of a config matches a module's name.

    Raises:
        LlmcError: the pattern is not a regular expression.
    """
    try:
        return match(pattern, module) is not None
    except re.error as error:
        raise LlmcError(f"'{pattern}' in {place} of the checkpoint's config is not a regular "
                        f"expression: {error}") from error


def arguments_of(scheme: Any) -> str:
    """A quantization scheme in the config's terms, for messages."""
    if not isinstance(scheme, Mapping):
        return str(scheme)
    how = [f"{scheme.get('num_bits')} bits", scheme.get("type"), scheme.get("strategy"),
           "dynamic" if scheme.get("dynamic") else "static"]
    return ", ".join(str(word) for word in how if word)
