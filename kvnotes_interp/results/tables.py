"""The fixed columns of a result, and reading and writing them as parquet that is the same byte for byte.

Everything passes through an Arrow table with this schema, in memory too, so a run that was killed and resumed from
its files holds exactly the values of one that was not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnotes_interp.errors import InputError
from kvnotes_interp.files import replacing

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

# One row per (pair, site, readout). Text that does not apply is "", a number that does not apply is missing.
FRAME_COLUMNS = {
    "pair": "string",
    "content": "string",
    "family": "string",
    "view": "string",
    "site": "string",
    "part": "string",
    "layer": "int64",
    "position": "int64",
    "token": "string",
    "region": "string",
    "delimiter": "bool",
    "anchor": "string",
    "ranking": "string",
    "k": "int64",
    "draw": "int64",
    "size": "int64",
    "readout": "string",
    "value": "float64",
}
# One row per tried pair.
PAIR_COLUMNS = {
    "pair": "string",
    "content": "string",
    "family": "string",
    "kind": "string",
    "split": "string",
    "competent": "bool",
    "reason": "string",
    "s_old": "float64",
    "s_new": "float64",
    "length": "int64",
    "field_start": "int64",
    "field_stop": "int64",
    "answer_old": "string",
    "answer_new": "string",
    "tokens": "list_string",
    "tokens_new": "list_string",
    "regions": "list_string",
    "anchors": "list_string",
    "delimiter": "list_bool",
}


def _arrow_type(name: str) -> pa.DataType:
    import pyarrow as pa

    return {
        "string": pa.string(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "bool": pa.bool_(),
        "list_string": pa.list_(pa.string()),
        "list_bool": pa.list_(pa.bool_()),
    }[name]


def to_arrow(frame: pd.DataFrame, columns: dict[str, str]) -> pa.Table:
    """`frame` with the fixed columns first and in order, then any others by name; absent ones are empty or missing.

    Raises InputError naming the column whose values do not fit its type.
    """
    import pyarrow as pa

    arrays: dict[str, Any] = {}
    for name, kind in columns.items():
        values = _values(frame[name]) if name in frame.columns else [None] * len(frame)
        if kind == "string":
            values = ["" if v is None else v for v in values]
        elif kind.startswith("list"):
            values = [None if v is None else list(v) for v in values]
        try:
            arrays[name] = pa.array(values, type=_arrow_type(kind))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise InputError(f"column {name!r} must hold {kind}: {error}") from error
    for name in sorted(str(c) for c in frame.columns if c not in columns):
        try:
            arrays[name] = pa.array(_values(frame[name]))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise InputError(f"column {name!r} mixes types: {error}") from error
    return pa.table(arrays)


def _values(column: pd.Series) -> list[Any]:
    """Plain Python values with None for every kind of missing; numpy scalars and lists of any kind become Python's."""
    out = []
    for value in column.tolist():
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, list | tuple):
            out.append(value)
        elif value is None or type(value).__name__ == "NAType" or value != value:
            out.append(None)
        else:
            out.append(value)
    return out


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """Whole numbers and truth values are nullable (Int64, boolean), text is `string`, lists are Python lists."""
    import pandas as pd
    import pyarrow as pa

    data: dict[str, Any] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        values = column.to_pylist()
        if pa.types.is_integer(column.type):
            data[name] = pd.array(values, dtype="Int64")
        elif pa.types.is_boolean(column.type):
            data[name] = pd.array(values, dtype="boolean")
        elif pa.types.is_floating(column.type):
            data[name] = pd.array([float("nan") if v is None else v for v in values], dtype="float64")
        elif pa.types.is_string(column.type):
            data[name] = pd.array(values, dtype="string")
        else:
            data[name] = pd.Series(values, dtype=object)
    return pd.DataFrame(data, columns=table.column_names)


def concat(tables: Iterable[pa.Table]) -> pa.Table:
    """Rows of all tables in order. A column that some lack is missing there."""
    import pyarrow as pa

    tables = list(tables)
    return pa.concat_tables(tables, promote_options="permissive").combine_chunks()


def write(table: pa.Table, path: Path) -> None:
    """Write atomically. The bytes depend on the rows alone: no pandas metadata, fixed compression and row groups."""
    import pyarrow.parquet as pq

    with replacing(path) as temporary:
        pq.write_table(
            table.replace_schema_metadata(None),
            temporary,
            compression="zstd",
            row_group_size=1 << 17,
            store_schema=False,
            version="2.6",
        )


def read(path: Path, columns: Mapping[str, str] | None = None) -> pa.Table:
    """Read what `write` wrote, with these fixed columns among its own.

    Raises InputError for a file that is missing, is no parquet, or lacks a column or holds another type in it.
    """
    table = read_parquet(path)
    for name, kind in (columns or {}).items():
        found = table.schema.field(name).type if name in table.column_names else None
        if found != _arrow_type(kind):
            has = f"holds {found}" if found else "is missing"
            raise InputError(f"{path}: the column {name!r} {has}, which should be {kind}. Copy the run's folder again.")
    return table


def read_parquet(path: Path) -> pa.Table:
    """Any parquet file. Raises InputError for one that is missing or broken."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # One file, not a dataset: folder names such as "part=kv" must not turn into columns.
        return pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} is not a parquet file that can be read ({error}). Copy or write it again.") from error
