"""Results as a Parquet file."""

from __future__ import annotations

import importlib
import json
from itertools import islice
from pathlib import Path
from typing import Any

from lfmfast.errors import ParameterError

__all__ = ["answer_columns", "as_row", "check_parquet", "write_table"]

ROWS = 1024
_TEXTS = ("text", "reasoning", "tool_calls", "finish_reason", "logprobs")
_JSON = ("tool_calls", "logprobs")  # what has parts, as JSON
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")


def check_parquet(path: Path) -> None:
    """Raise ParameterError where Parquet can't be written."""
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ParameterError(f"{path} needs pyarrow: pip install 'lfmfast[parquet]'") from error


def answer_columns(*, several: bool) -> list[tuple[str, Any]]:
    """Names and Arrow types of what an answer has."""
    arrow: Any = importlib.import_module("pyarrow")
    each = arrow.list_ if several else lambda kind: kind
    return [*((name, each(arrow.string())) for name in _TEXTS), ("seed", each(arrow.int64())),
            *((name, arrow.int64()) for name in _COUNTS), ("error", arrow.string())]  # fmt: skip


def write_table(lines: Path, path: Path, *, several: bool) -> None:
    """Write the results in `lines` (one flat JSON object each) to a Parquet file, which appears when it is whole.

    Parameters
    ----------
    several : bool
        Lines have several answers: what each has is a list.
    """
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    schema = arrow.schema([("line", arrow.int64()), ("custom_id", arrow.string()), *answer_columns(several=several)])
    part = path.with_name(path.name + ".new")
    with lines.open("rb") as file, parquet.ParquetWriter(part, schema) as writer:
        while rows := [as_row(json.loads(line), several=several) for line in islice(file, ROWS)]:
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
    part.replace(path)


def as_row(result: dict[str, Any], *, several: bool) -> dict[str, Any]:
    """A flat result as a row: what has parts is JSON in it."""
    row = dict(result)
    for name in _JSON:
        values = row[name] if several else [row[name]]
        texts = [None if not value else json.dumps(value, ensure_ascii=False) for value in values or ()]
        row[name] = texts if several and values is not None else texts[0] if texts else None
    return row
