"""The schema browser: what each view and table answers, and its columns.

Pure: the frame of ``queries.catalog`` in, HTML out.
"""

from __future__ import annotations

from dashboards.queries import Frame
from dashboards.text import escape


def browser(catalog: Frame, needle: str) -> str:
    """HTML list of the relations of ``queries.catalog`` whose name, description or column contains ``needle``."""
    needle = needle.strip().lower()
    items = []
    for relation, columns in catalog.groupby("relation", sort=False):
        name = str(relation)
        about = columns["about"].iloc[0] or ""
        in_columns = [needle in str(column).lower() for column in columns["name"]]
        if needle and needle not in f"{name} {about}".lower() and not any(in_columns):
            continue
        rows = "".join(
            f"<tr><td>{_bold(column) if needle and hit else escape(column)}</td><td>{escape(sql_type)}</td></tr>"
            for column, sql_type, hit in zip(columns["name"], columns["type"], in_columns, strict=True)
        )
        kind = "view" if columns["is_view"].iloc[0] else "table"
        opened = " open" if needle and any(in_columns) else ""
        items.append(
            f'<details{opened}><summary><b>{escape(name)}</b> <span class="rl-dim">{kind}</span></summary>'
            + (f"<p>{escape(about)}</p>" if about else "")
            + f"<table>{rows}</table></details>"
        )
    return f'<div class="rl-schema">{"".join(items) or "Nothing has that name."}</div>'


def _bold(text: str) -> str:
    return f"<b>{escape(text)}</b>"
