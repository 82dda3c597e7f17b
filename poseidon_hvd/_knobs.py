"""One knob is one field: what follows from a field of the configuration."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional, TypeVar

from ._values import from_environment

__all__ = ["InSession", "Knob", "Knobs", "Scope", "knob"]

_KEY = "knob"
_Settings = TypeVar("_Settings", bound="Knobs")


@dataclasses.dataclass(frozen=True)
class Scope:
    """Where a setting is applied: the names of the parameters and the number of the process set."""

    names: Sequence[str]
    process_set: int


def _value(settings: Any, name: str, scope: Scope) -> Any:
    return getattr(settings, name)


def _text(value: Any, scope: Scope) -> str:
    return str(value)


def _unchanged(value: Any, before: Mapping[str, Any]) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class Knob:
    """What a field is beyond its name, type and default.

    Attributes:
        parse: ``(source, value)`` -> checked value. It raises ValueError with a message that begins with ``source``.
        values: what may be given, for the table in docs/configuration.md.
        shown_default: the default in that table.
        variable: the environment variable, if there is one.
        parse_text: as ``parse``, for the variable's text; None: ``parse``.
        environment: replaces the reading of ``variable``: returns the source and the checked value, or None.
        argument: ``DistributedOptimizer`` takes it.
        agreed: ranks compare their values, and a difference is an error.
        option: the C++ session takes it, under the field's name.
        settle: ``(value, fields before it)`` -> value, where one setting depends on another.
        in_session: ``(settings, name, scope)`` -> the value that a session gets.
        agreed_text: ``(value in the session, scope)`` -> what ranks compare.
    """

    parse: Callable[[str, Any], Any]
    values: str
    shown_default: str
    variable: Optional[str] = None
    parse_text: Optional[Callable[[str, str], Any]] = None
    environment: Optional[Callable[[], Optional[tuple[str, Any]]]] = None
    argument: bool = True
    agreed: bool = True
    option: bool = True
    settle: Callable[[Any, Mapping[str, Any]], Any] = _unchanged
    in_session: Callable[[Any, str, Scope], Any] = _value
    agreed_text: Callable[[Any, Scope], str] = _text

    def from_environment(self) -> Optional[tuple[str, Any]]:
        """The variable and its checked value, or None where it is not set."""
        if self.environment is not None:
            return self.environment()
        text = None if self.variable is None else from_environment(self.variable)
        if self.variable is None or text is None:
            return None
        return self.variable, (self.parse_text or self.parse)(self.variable, text)


def knob(default: Any = dataclasses.MISSING, *, default_factory: Any = dataclasses.MISSING, **options: Any) -> Any:
    """A field that is a ``Knob`` with these options."""
    metadata = {_KEY: Knob(**options)}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class InSession:
    """Settings as one session has them.

    Attributes:
        options: what the C++ session takes, by name.
        agreed: what ranks compare, by name.
    """

    options: Mapping[str, Any]
    agreed: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Base of the configuration. Its subclasses have fields made by ``knob()``.

    Attributes:
        sources: field -> the argument or variable that its value came from, for messages.
    """

    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def knobs(cls) -> dict[str, Knob]:
        """By field, in their order."""
        return {field.name: field.metadata[_KEY] for field in dataclasses.fields(cls) if _KEY in field.metadata}

    @classmethod
    def resolve(cls: type[_Settings], **arguments: Any) -> _Settings:
        """Arguments override the environment, which overrides defaults, knob by knob. None means not given.

        Raises:
            ValueError: a value that does not exist, or out of its range; the message names the argument or variable,
                and what may be.
        """
        knobs = cls.knobs()
        unknown = [name for name in arguments if name not in knobs or not knobs[name].argument]
        if unknown:
            raise TypeError(f"{cls.__name__}.resolve() has no argument {unknown[0]!r}.")
        defaults = cls()
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for name, each in knobs.items():
            given = arguments.get(name)
            found = each.from_environment() if given is None else (name, each.parse(name, given))
            sources[name], value = (name, getattr(defaults, name)) if found is None else found
            values[name] = each.settle(value, values)
        return cls(sources=sources, **values)

    def in_session(self, names: Sequence[str], process_set: int) -> InSession:
        """For a session over these parameters and this process set.

        Raises:
            ValueError: a setting does not fit these parameters.
        """
        scope = Scope(names, process_set)
        options: dict[str, Any] = {}
        agreed: dict[str, str] = {}
        for name, each in self.knobs().items():
            value = each.in_session(self, name, scope)
            if each.option:
                options[name] = value
            if each.agreed:
                agreed[name] = each.agreed_text(value, scope)
        return InSession(options, agreed)
