"""Records with named columns from JSON, CSV, TSV and Parquet files, one at a time."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from outpace.data.delimited_rows import read_delimited
from outpace.data.file_kinds import Form, form_of
from outpace.data.file_reader import readable
from outpace.data.json_rows import READ_BYTES, first_sign, json_lines, json_list
from outpace.data.row import Row, require_distinct, without_fillers
from outpace.data.text_checks import lines_of, require_text
from outpace.records.errors import BadInputError, quote_names


def read_rows(
    file: Path,
    form: Form | None = None,
    columns: Sequence[str] | None = None,
    on_left_out: Callable[[str], None] | None = None,
) -> Iterator[tuple[Row, int]]:
    """Yield each record of a file with its approximate size in bytes.

    `form` defaults to the format of the suffix. `columns` limits which columns of a Parquet file
    are read. `on_left_out` receives the locations of lines that `read_delimited` can skip; if it is
    None, such lines are refused. Raises BadInputError, naming the location that cannot be read.
    """
    form = form or form_of(file)
    if form == "json":
        return json_list(file) if first_sign(file) == "[" else json_lines(file)
    if form == "parquet":
        return _read_parquet(file, columns)
    if form == "text":
        _require_tabs(file)
    return read_delimited(file, "," if form == "csv" else "\t", on_left_out)


def _require_tabs(file: Path) -> None:
    """Refuse plain text. A .txt with tabs in its first line is a table, as in some benchmarks."""
    if file.suffix.lower() == ".txt":
        first = next((line for line in lines_of(file) if line.strip()), "")
        if "\t" in first:
            return
    with readable(file) as stream:
        require_text(file, stream.read(READ_BYTES))
    raise BadInputError(
        f"{file} is plain text, not rows with columns, as conversations and labels are. Give "
        ".jsonl, .json, .tsv, .csv, .parquet or hf:NAME. Training and eval take texts with --task "
        "pretrain."
    )


def _read_parquet(file: Path, columns: Sequence[str] | None) -> Iterator[tuple[Row, int]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        require_distinct(names, str(file))
        missing = next((name for name in columns or () if name not in names), None)
        if missing is not None:
            raise BadInputError(
                f"{file} has no column {missing!r}, but {quote_names(names)}. "
                "Name it with --text-field."
            )
        share = file.stat().st_size // max(1, table.metadata.num_rows)
        number = 0
        for batch in table.iter_batches(
            columns=None if columns is None else list(columns), batch_size=1000
        ):
            for values in batch.to_pylist():
                number += 1
                yield Row(without_fillers(values), f"{file}, row {number}"), share
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise BadInputError(f"{file} is not a readable Parquet file: {error}") from None
