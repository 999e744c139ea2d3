"""Merges a settings struct's sources, checks each value, and makes flags of its fields.

A settings struct is a frozen `msgspec.Struct` whose every field is `Annotated[type, Meta(description=..., ge=...)]`;
limits of a type that may be None stand inside: `Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description=...)]`.
Values may be given as text everywhere; `none` stands for None, and a tuple is written `a,b`.
"""

from __future__ import annotations

import argparse
import tomllib
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from paceline.errors import ConfigError, quote

ENV_PREFIX: Final = "PACELINE_"

S = TypeVar("S", bound=msgspec.Struct)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a settings struct, as flags, files and messages speak of it."""

    name: str
    annotation: Any
    description: str
    default: object  # shown in the help; None also where a factory makes it

    @property
    def flag(self) -> str:
        """`--kebab-case`."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """`PACELINE_UPPER_CASE`."""
        return ENV_PREFIX + self.name.upper()

    @property
    def is_bool(self) -> bool:
        """True where the flag takes no value and has a `--no-` twin."""
        return bool in self._members

    @property
    def optional(self) -> bool:
        """True where None is legal."""
        return types.NoneType in self._members

    @property
    def is_tuple(self) -> bool:
        """True for a tuple, which text separates by commas."""
        return any(typing.get_origin(member) is tuple for member in self._members)

    @property
    def choices(self) -> tuple[str, ...]:
        """The legal values of an enumeration; empty for any other type."""
        return tuple(c for m in self._members if typing.get_origin(m) is typing.Literal for c in typing.get_args(m))

    @property
    def placeholder(self) -> str:
        """What stands for the value in a usage line."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        names = {int: "N", float: "NUMBER", Path: "PATH"}
        return next((names[member] for member in self._members if member in names), "TEXT")

    @property
    def _members(self) -> tuple[Any, ...]:
        """The types of the annotation's union, bare of their limits."""
        plain = _bare(self.annotation)
        if typing.get_origin(plain) in (types.UnionType, typing.Union):
            return tuple(_bare(member) for member in typing.get_args(plain))
        return (plain,)

    def convert(self, value: object, source: str) -> object:
        """The value in the field's type, or ConfigError naming setting, value, source and limit."""
        parsed: object = value
        if isinstance(value, str) and self.optional and value.lower() == "none":
            return None
        if isinstance(value, str) and self.is_tuple:
            parsed = [part.strip() for part in value.split(",") if part.strip()]
        try:
            return msgspec.convert(parsed, self.annotation, strict=False, dec_hook=_decode_path)
        except msgspec.ValidationError as error:
            limit = f"one of {', '.join(self.choices)}" if self.choices else str(error).removesuffix(" - at `$`")
            raise ConfigError(f"{self.name}: {quote(value)} (from {source}) is not accepted: {limit}") from error


@cache
def settings_of(cls: type[msgspec.Struct]) -> dict[str, Setting]:
    """The fields of a settings struct, by name, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(cls):
        metas = [meta for meta in typing.get_args(hints[field.name])[1:] if isinstance(meta, msgspec.Meta)]
        assert metas and metas[0].description, f"{cls.__name__}.{field.name} has no description"
        default = None if field.default is msgspec.NODEFAULT else field.default
        found[field.name] = Setting(
            name=field.name, annotation=hints[field.name], description=metas[0].description, default=default
        )
    return found


def add_flags(parser: argparse.ArgumentParser, cls: type[msgspec.Struct]) -> None:
    """A flag for each field. A flag that is not given leaves no attribute, so `vars` holds what was given."""
    for setting in settings_of(cls).values():
        shown = "" if setting.default is None else f" (default: {_as_text(setting.default)})"
        help_text = f"{setting.description}{shown}".replace("%", "%%")
        if setting.is_bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(
                setting.flag, dest=setting.name, default=argparse.SUPPRESS, help=help_text, action=action
            )
        else:
            metavar = setting.placeholder
            parser.add_argument(
                setting.flag, dest=setting.name, default=argparse.SUPPRESS, help=help_text, metavar=metavar
            )


def flags_for(cls: type[msgspec.Struct], values: Mapping[str, object]) -> list[str]:
    """The command line that sets `values` again; what `cls` has no field for is left out. For starting a role."""
    line: list[str] = []
    for name, value in values.items():
        setting = settings_of(cls).get(name)
        if setting is None:
            continue
        if setting.is_bool and value is None:
            continue  # a switch can't say it; it is the default
        if setting.is_bool:
            line.append(setting.flag if value in (True, "true") else setting.flag.replace("--", "--no-", 1))
        else:
            line.append(f"{setting.flag}={_as_text(value)}")
    return line


def merge(
    cls: type[S],
    *,
    section: str,
    sections: Mapping[str, type[msgspec.Struct]],
    file: Path | None,
    env: Mapping[str, str],
    flags: Mapping[str, object],
    defaults: Mapping[str, object],
) -> S:
    """A checked `cls` from defaults < file < environment < flags. Keys of `flags` that are no setting are left alone.

    `section` is the table of `file` that is `cls`'s own; `sections` holds every role's struct, to tell a key that
    another role knows from a mistyped one. Raises ConfigError.
    """
    settings = settings_of(cls)
    values: dict[str, object] = dict(defaults)
    if file is not None:
        for name, value in _file_values(file, settings, section, sections).items():
            values[name] = settings[name].convert(value, str(file))
    for name, setting in settings.items():
        if setting.env in env:
            values[name] = setting.convert(env[setting.env], f"the environment's {setting.env}")
        if name in flags:
            values[name] = setting.convert(flags[name], setting.flag)
    return cls(**values)


def _file_values(
    file: Path, settings: Mapping[str, Setting], section: str, sections: Mapping[str, type[msgspec.Struct]]
) -> dict[str, object]:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {file} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {file} is not TOML: {error}") from error
    known_anywhere = {name for cls in sections.values() for name in settings_of(cls)}
    values: dict[str, object] = {}
    for key, value in tables.items():
        if isinstance(value, dict):
            if key not in sections:
                raise ConfigError(f"config file {file} has a table [{key}]; the tables are {', '.join(sections)}")
            _reject_unknown(file, f"[{key}] ", value, set(settings_of(sections[key])))
        else:
            _reject_unknown(file, "", {key: value}, known_anywhere)
            if key in settings:
                values[key] = value
    return {**values, **tables.get(section, {})}


def _reject_unknown(file: Path, where: str, table: Mapping[str, object], known: set[str]) -> None:
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"config file {file}: {where}{key} = {quote(value)} is no setting; see --help for all")


def _bare(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _as_text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value)


def _decode_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    raise NotImplementedError(f"no setting may be a {kind}")
