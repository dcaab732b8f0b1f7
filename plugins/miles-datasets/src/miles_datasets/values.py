"""Values of Arrow as JSON would have them, so that a row is the same whatever file it comes from."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pyarrow

Convert = Callable[[Any], Any]
SPARSE = ("role", "function", "parameters")
"""Keys of objects in a list that tell of chat messages and of tools, with or without their "function" around them."""


def rows(table: pyarrow.Table | pyarrow.RecordBatch, media: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Rows of a table without columns of bytes, but for those of media, whose bytes are text in base64.

    Times and dates are text of ISO 8601, durations seconds, decimals text. What is null in a chat message or in what
    describes a tool is left out: files of columns give each of them the keys of all.
    """
    columns = table.select([field.name for field in table.schema if field.name in media or not holds_bytes(field.type)])
    converters = {field.name: convert for field in columns.schema if (convert := converter(field.type)) is not None}
    for row in columns.to_pylist():
        for name, convert in converters.items():
            row[name] = convert(row[name])
        yield row


def holds_bytes(kind: pyarrow.DataType) -> bool:
    """Whether a type is one of bytes, or has them somewhere in it: images, sound."""
    if pyarrow.types.is_struct(kind):
        return any(holds_bytes(kind.field(i).type) for i in range(kind.num_fields))
    if pyarrow.types.is_map(kind):
        return holds_bytes(kind.item_type)
    if _is_list(kind) or pyarrow.types.is_dictionary(kind):
        return holds_bytes(kind.value_type)
    return _is_bytes(kind)


def _is_bytes(kind: pyarrow.DataType) -> bool:
    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)
                or pyarrow.types.is_fixed_size_binary(kind) or pyarrow.types.is_binary_view(kind))


def converter(kind: pyarrow.DataType) -> Convert | None:
    """What makes JSON of the Python values of a type; None where they are JSON as they are."""
    types = pyarrow.types
    if types.is_dictionary(kind):
        return converter(kind.value_type)
    if _is_list(kind):
        return _of_list(kind.value_type)
    if types.is_map(kind):
        inner = converter(kind.item_type) or _same
        return _unless_none(lambda pairs: {str(key): inner(value) for key, value in pairs})
    if types.is_struct(kind):
        fields = {kind.field(i).name: convert for i in range(kind.num_fields)
                  if (convert := converter(kind.field(i).type)) is not None}
        return _unless_none(lambda value: {**value, **{name: convert(value[name]) for name, convert in fields.items()}}
                            ) if fields else None
    plain = _plain(kind)
    return None if plain is None else _unless_none(plain)


def _plain(kind: pyarrow.DataType) -> Convert | None:
    types = pyarrow.types
    if isinstance(kind, pyarrow.JsonType):
        return json.loads
    if _is_bytes(kind):
        return lambda value: base64.b64encode(value).decode()
    if types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind):
        return lambda value: value.isoformat()
    if types.is_duration(kind):
        return lambda value: value.total_seconds()
    return str if types.is_decimal(kind) or isinstance(kind, pyarrow.UuidType) else None


def _of_list(kind: pyarrow.DataType) -> Convert | None:
    inner = converter(kind)
    if pyarrow.types.is_struct(kind) and any(kind.get_field_index(key) >= 0 for key in SPARSE):
        convert = inner or _same
        return _unless_none(lambda values: [_without_nulls(convert(value)) for value in values])
    return None if inner is None else _unless_none(lambda values: [inner(value) for value in values])


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _is_list(kind: pyarrow.DataType) -> bool:
    return bool(pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
                or pyarrow.types.is_fixed_size_list(kind) or pyarrow.types.is_list_view(kind))


def _unless_none(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _same(value: Any) -> Any:
    return value
