"""Pages are made from templates; each is one HTML file that needs no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

__all__ = ["fill"]


def fill(template: Path, **values: Any) -> str:
    """Fill a template with its values; it may extend others of its folder, and of this one.

    Raises:
        LookupError: a value that the template wants is missing.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    try:
        return environment.get_template(template.name).render(**values)
    except jinja2.UndefinedError as error:
        raise LookupError(error.message) from None
