"""Every refusal of the schema, by what is refused."""

from __future__ import annotations

from pydantic import ValidationError


class Refusal(ValueError):
    """One line that names the thing, its value, what is allowed and what to do next."""


class UnknownContract(Refusal):
    """No contract of that name, or one that cannot be read."""


class UnsupportedModel(Refusal):
    """A model that the contract's profile does not cover."""


class LayoutRefused(Refusal):
    """A parallel layout outside the rules of the contract."""


class OptionRefused(Refusal):
    """An engine option that would break exactness, or that nobody has classed yet."""


class VersionRefused(Refusal):
    """A package version that the contract has not been proven on."""


class DigestMismatch(Refusal):
    """A vendored file that is not the file that was vendored."""


class ReceiptMismatch(Refusal):
    """Receipts that are absent, surplus or different."""


def one_line(error: ValidationError) -> str:
    """Return a validation error as one line: `field.path: message; ...`."""
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc']) or 'value'}: {item['msg']}"
        for item in error.errors(include_url=False)
    )
