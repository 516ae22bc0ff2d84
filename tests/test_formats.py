from unisono.formats import format_bytes, format_duration, format_seconds, markdown_table


def test_formats() -> None:
    assert [format_bytes(n) for n in (7, 1024, 3 << 19, 5 << 30)] == ["7 B", "1 KiB", "1.5 MiB", "5 GiB"]
    assert [format_seconds(s) for s in (0, 4e-7, 3e-5, 0.25, 2)] == ["0 µs", "0.4 µs", "30 µs", "250 ms", "2 s"]
    assert [format_duration(s) for s in (59.94, 59.96, 60, 3599.6)] == ["59.9 s", "60.0 s", "1:00 min", "1:00:00 h"]


def test_a_table_has_as_many_cells_in_every_row_and_escapes_its_own_character() -> None:
    assert markdown_table(["name", "a", "b"], [["one|two", "1", "2"]]) == [
        "| name | a | b |",
        "| --- | ---: | ---: |",
        "| one&#124;two | 1 | 2 |",
    ]
