"""Sections whose ``type`` names a function, built in or a plugin's."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import ConfigDict, Discriminator, Tag

from rlinsight.config.base import Section

PLUGIN = "plugin"  # tag of a section whose type is not built in


class PluginFunction(Section):
    """A function of a file in ``plugins``; every other key is an option of it."""

    model_config = ConfigDict(extra="allow")
    type: str


def types_of(variants: tuple[type[Section], ...]) -> tuple[str, ...]:
    """The ``type`` of each section."""
    return tuple(get_args(variant.model_fields["type"].annotation)[0] for variant in variants)


def by_type(variants: tuple[type[Section], ...]) -> Any:
    """A union tagged by ``type``; a type none of them has is a plugin's."""
    tags = dict(zip(types_of(variants), variants, strict=True))

    def tag(value: Any) -> str | None:
        name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return name if name is None or name in tags else PLUGIN

    union: Any = Annotated[PluginFunction, Tag(PLUGIN)]
    for name, variant in tags.items():
        union = union | Annotated[variant, Tag(name)]  # type: ignore[valid-type]
    return Annotated[union, Discriminator(tag)]
