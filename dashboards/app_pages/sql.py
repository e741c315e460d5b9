"""SQL: ask the store anything, read-only."""

from __future__ import annotations

import io
import time

import pyarrow as pa
import pyarrow.parquet as pq
import streamlit as st

from dashboards import examples, frame, queries, schema
from dashboards.frame import View
from dashboards.queries import Frame
from rlinsight import statements, store
from rlinsight.errors import StoreError

MAX_ROWS = 100_000  # rows fetched, shown and offered for download


def body(view: View) -> None:
    left, right = st.columns([7, 3], gap="medium")
    with left:
        sql = _editor(view)
        if sql.strip():
            _answer(view, sql)
    with right:
        _catalog(queries.catalog(view.read))


def _editor(view: View) -> str:
    """The text to run: what was last submitted."""
    by_title = {example.title: example for example in examples.EXAMPLES}

    def take() -> None:
        title = st.session_state["example"]
        if title is not None:
            st.session_state["sql"] = st.session_state["asked"] = by_title[title].sql_for(view.run_id)

    st.selectbox(
        "Examples", list(by_title), index=None, key="example", on_change=take, placeholder="Questions worth asking",
        label_visibility="collapsed",
    )  # fmt: skip
    st.session_state.setdefault("sql", st.session_state.get("asked", examples.EXAMPLES[0].sql_for(view.run_id)))
    with st.form("editor", border=False):
        text = st.text_area("SQL", key="sql", height=210, label_visibility="collapsed")
        with st.container(horizontal=True, vertical_alignment="center"):
            if st.form_submit_button("Run", type="primary", shortcut="Ctrl+Enter"):
                st.session_state["asked"] = text
            st.caption("Read-only DuckDB SQL, one statement. Ctrl+Enter runs it.")
    return st.session_state.get("asked", "")


def _answer(view: View, sql: str) -> None:
    began = time.perf_counter()
    try:
        table = store.query(bounded(sql), store=view.path)
    except StoreError as error:
        st.html('<div class="rl-note" style="border-color:#d1495b">The query was refused or failed:</div>')
        st.code(str(error), language=None, wrap_lines=True)
        return
    took = time.perf_counter() - began
    cut = table.num_rows > MAX_ROWS
    table = apart(table.slice(0, MAX_ROWS))
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        more = f"first {MAX_ROWS:,} rows; `rlinsight sql` has no such cap" if cut else f"{table.num_rows:,} rows"
        st.caption(f"{more} · {table.num_columns} columns · {took * 1000:,.0f} ms")
        if table.num_columns:
            st.download_button("CSV", lambda: csv(table), "rlinsight.csv", "text/csv", type="tertiary")
            st.download_button("Parquet", lambda: parquet(table), "rlinsight.parquet", type="tertiary")
    st.dataframe(table, hide_index=True, height=460 if table.num_rows > 12 else "content", placeholder="NULL")


def bounded(sql: str) -> str:
    """``sql`` with at most MAX_ROWS + 1 rows, when it is a query a LIMIT can stand around; else as it is.

    Raises StoreError for what is not one reading statement, about the text as it was written.
    """
    statements.check(sql)
    wrapped = f"SELECT * FROM (\n{sql.strip().rstrip(';')}\n) LIMIT {MAX_ROWS + 1}"
    try:
        statements.check(wrapped)
    except StoreError:
        return sql  # SHOW, EXPLAIN and the like; the store's own time and size limits hold
    return wrapped


def apart(table: pa.Table) -> pa.Table:
    """The table with equal column names numbered: tables and files cannot hold two of one name."""
    names: list[str] = []
    for name in table.column_names:
        taken = sum(other == name or other.startswith(f"{name}:") for other in names)
        names.append(f"{name}:{taken}" if taken else name)
    return table.rename_columns(names)


def csv(table: pa.Table) -> bytes:
    """CSV of any table, lists and structs in DuckDB's text form."""
    return table.to_pandas().to_csv(index=False).encode()


def parquet(table: pa.Table) -> bytes:
    """Parquet of the table, types kept."""
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _catalog(catalog: Frame) -> None:
    needle = st.text_input(
        "Schema", key="needle", placeholder="find a view or column", label_visibility="collapsed", live=True
    )
    st.html(schema.browser(catalog, needle or ""))


frame.page(body, refresh=False)
