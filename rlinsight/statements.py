"""Which SQL statements a reader may run, the same in the collector and on the file; and DuckDB's errors about them.

Knows statements alone, no store. Loads duckdb on first use only.
"""

from __future__ import annotations

import re
from itertools import pairwise

from rlinsight.errors import StoreError

# Functions a SELECT can call to change the server, reach raw memory, or run SQL this policy has not seen.
_FORBIDDEN = re.compile(
    r"quack_\w+|(force_)?checkpoint|(enable|disable|truncate)_(\w*logging|duckdb_logs|prof\w+)|write_log|set_\w+|"
    r"nextval|query|json_execute_serialized_sql|python_map_function|(arrow|pandas|seq)_scan\w*|(import|copy)_database"
)
# To DuckDB's tokenizer all letters beyond ASCII are parts of words; its parser takes spaces among them for spaces.
_WORD = re.compile(r"[^\s\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]+")


def check(sql: str) -> None:
    """Raises StoreError unless ``sql`` is one statement that only reads, or EXPLAIN of one."""
    import duckdb

    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        raise sql_error(error) from None
    # PIVOT without a list of values is parsed into two statements, the first without a text of its own.
    while len(statements) > 1 and statements[0].type == duckdb.StatementType.CREATE and not statements[0].query:
        statements = statements[1:]
    if len(statements) != 1:
        raise StoreError(f"queries are one statement, this is {len(statements)}; send them one by one")
    if statements[0].type == duckdb.StatementType.EXPLAIN:
        return check(_explained(sql))
    tokens = [text for _, text in _tokens(sql)]
    if statements[0].type != duckdb.StatementType.SELECT or not tokens or tokens[0] == "pragma":
        first = tokens[0].upper() if tokens else "an empty text"
        raise StoreError(f"the store is read-only: {first} is refused; SELECT, EXPLAIN, DESCRIBE, SHOW, SUMMARIZE work")
    for name, following in pairwise(tokens):
        if following == "(" and _FORBIDDEN.fullmatch(name):
            raise StoreError(f"the store is read-only: function {name} is refused")


def _explained(sql: str) -> str:
    """The statement behind EXPLAIN, without ANALYZE or options in parentheses. EXPLAIN ANALYZE runs it."""
    import duckdb

    tokens = _tokens(sql)[1:]
    if tokens[0][1] == "analyze":
        tokens = tokens[1:]
    statement = sql.encode()[tokens[0][0] :].decode()
    if tokens[0][1] == "(":
        try:
            duckdb.extract_statements(statement)  # (SELECT ...)
        except duckdb.Error:  # options
            closing = [text for _, text in tokens].index(")")
            statement = sql.encode()[tokens[closing][0] + 1 :].decode()
    return statement


def _tokens(sql: str) -> list[tuple[int, str]]:
    """Words and operators of a statement with their byte offsets, lower case, without quotes, literals and comments."""
    import duckdb

    tokens = []
    ends = duckdb.tokenize(sql)
    for (start, kind), (end, _) in zip(ends, [*ends[1:], (len(sql.encode()), None)], strict=True):
        if kind in (duckdb.token_type.identifier, duckdb.token_type.keyword, duckdb.token_type.operator):
            text = re.split(r"[ \t\n\v\f\r]|--|/\*", sql.encode()[start:end].decode(), maxsplit=1)[0]
            for word in _WORD.finditer(text):
                tokens.append((start + len(text[: word.start()].encode()), word[0].strip('"').lower()))
    return tokens


def sql_error(error: Exception) -> StoreError:
    """DuckDB's message on one line, without its quotation of the statement."""
    return StoreError(" ".join(str(error).split("\n\nLINE")[0].split()))
