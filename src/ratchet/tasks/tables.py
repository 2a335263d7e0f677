"""Rows of tables on disk, by pyarrow.

Consumes a path, produces the files of a split and their rows; waits for the disk. What is in a row
is plain Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ratchet.errors import TaskError
from ratchet.tasks.arguments import suggest
from ratchet.tasks.jsonl import lines

_SUFFIXES: Final = (".parquet", ".arrow", ".jsonl")
_USUAL_SPLITS: Final = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})


def find_files(path: Path, *, field: str, split: str | None) -> list[Path]:
    """Return the files of a split, in order.

    Args:
        path: a file; a folder of the datasets library; or any folder of files, whose names begin
            with their split, or that are in a folder of its name.
        field: the argument that the path is from, for the errors.
        split: which; None for all there is, which must not be several splits.

    Raises:
        TaskError: if there are none.
    """
    where = f"task.args.{field}: {path}"
    if path.is_file():
        if split is not None:
            msg = f"{where} is one file, which has no splits; leave the split {split!r} out"
            raise TaskError(msg)
        return [_known(path, where)]
    if not path.is_dir():
        msg = f"{where} is not there; data is read from this machine's disk only"
        raise TaskError(msg)
    if (path / "dataset_dict.json").is_file():  # DatasetDict.save_to_disk
        path = path / _one_of(_json(path / "dataset_dict.json")["splits"], split, where)
        split = None
    if (path / "state.json").is_file():  # Dataset.save_to_disk
        return _saved_files(path, split, where)
    files = sorted(
        each.relative_to(path)
        for each in path.rglob("*")
        if each.suffix in _SUFFIXES and each.is_file()
    )
    found = [each for each in files if split is None or split in _words(each)]
    if not found:
        names = ", ".join(str(each) for each in files[:8]) or "none"
        of_split = "" if split is None else f" of the split {split!r}"
        msg = f"{where} holds no {'/'.join(_SUFFIXES)} files{of_split}; those there are: {names}"
        raise TaskError(msg)
    splits = sorted(_USUAL_SPLITS & set().union(*map(_words, found)))
    if split is None and len(splits) > 1:
        _one_of(splits, None, where)
    return [path / each for each in found]


def read_rows(
    files: Sequence[Path], fields: Sequence[str], optional: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place ("file:row", from 1) and the fields of each row, in order.

    Args:
        files: as `find_files` returns them.
        fields: columns, or paths into them; of a path, the whole column.
        optional: the field that need not be there.

    Raises:
        TaskError: if a file cannot be read, or a table has no such column.
    """
    for file in files:
        if file.suffix == ".jsonl":
            yield from _json_rows(file)
        else:
            yield from _table_rows(file, fields, optional)


def _json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for place, line in lines("path", file):
        try:
            yield place, msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            msg = f"{place}: {error}; a line is one JSON object"
            raise TaskError(msg) from None


def _table_rows(
    file: Path, fields: Sequence[str], optional: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa

    row = 0
    try:
        for batch in _batches(file, fields, optional):
            for values in batch.to_pylist():
                row += 1
                yield f"{file}:{row}", values
    except (pa.ArrowException, OSError) as error:
        msg = f"{file}: cannot be read behind row {row}: {error}"
        raise TaskError(msg) from error


def _batches(file: Path, fields: Sequence[str], optional: str | None) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.suffix == ".parquet":
        with pq.ParquetFile(file) as table:
            columns = _columns(table.schema_arrow.names, fields, optional, file)
            yield from table.iter_batches(columns=columns)
        return
    with pa.memory_map(str(file)) as source:
        try:
            reader = pa.ipc.open_stream(source)  # what the datasets library writes
            batches = iter(reader)
        except pa.ArrowInvalid:
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        columns = _columns(reader.schema.names, fields, optional, file)
        yield from (batch.select(columns) for batch in batches)


def _columns(
    known: Sequence[str], fields: Sequence[str], optional: str | None, file: Path
) -> list[str]:
    columns = set()
    for field in fields:
        column = field if field in known else field.partition(".")[0]
        if column in known:
            columns.add(column)
        elif field != optional:
            msg = f"{file} has no column {column!r}; {suggest(column, list(known))}"
            raise TaskError(msg)
    return sorted(columns)


def _saved_files(path: Path, split: str | None, where: str) -> list[Path]:
    state = _json(path / "state.json")
    if split is not None and split != state.get("_split"):
        msg = f"{where} is the one split {state.get('_split')!r}, not {split!r}; leave it out"
        raise TaskError(msg)
    files = [path / each["filename"] for each in state["_data_files"]]
    outside = [each for each in files if each.parent != path]
    if outside:
        msg = f"{where}: state.json names {outside[0]}, which is not in that folder"
        raise TaskError(msg)
    return files


def _words(file: Path) -> set[str]:
    """Return what may be the split of a file: its folders, and what its name begins with, as in
    "train-00000-of-00002.parquet".
    """
    return {*file.parts[:-1], file.name.partition(".")[0].partition("-")[0]}


def _known(path: Path, where: str) -> Path:
    if path.suffix not in _SUFFIXES:
        msg = f"{where} is none of {', '.join(_SUFFIXES)}"
        raise TaskError(msg)
    return path


def _one_of(splits: Sequence[str], split: str | None, where: str) -> str:
    if split is None:
        if len(splits) == 1:
            return splits[0]
        msg = f"{where} has several splits; say which: {', '.join(splits)} (task.args.split)"
        raise TaskError(msg)
    if split not in splits:
        msg = f"{where} has no split {split!r}; {suggest(split, list(splits))}"
        raise TaskError(msg)
    return split


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        msg = f"{path} cannot be read: {error}"
        raise TaskError(msg) from None
