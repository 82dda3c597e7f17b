"""Programs print as the Python that makes them."""

import dataclasses


class Short:
    """For dataclasses: ``repr`` without what is default, positional as far as it goes."""

    def __repr__(self) -> str:
        parts, positional = [], True
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                positional = False
                continue
            parts.append(repr(value) if positional else f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"
