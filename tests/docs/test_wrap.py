"""What `make fix` does to paragraphs, and what it leaves alone."""

from textwrap import dedent

from tools.wrap import filled_code, filled_page

LONG = "many words " * 15


def test_a_paragraph_is_filled_and_what_is_no_text_stays() -> None:
    page = dedent(f"""\
        # Heading {LONG.strip()}

        torn
        lines, and `a span of code`

        - item {LONG.strip()}
        - another

        | table | {LONG.strip()} |
        |---|---|

        ```python
        code  =  1
        also = 2
        ```
        """)
    filled = filled_page(page)
    assert "torn lines, and `a span of code`\n" in filled
    assert max(len(line) for line in filled.splitlines() if line[:1] not in ("#", "|")) <= 120
    assert "\n  many words" in filled or "\n  words many" in filled, "the rest of an item is indented"
    for kept in (page.splitlines()[0], f"| table | {LONG.strip()} |", "code  =  1\nalso = 2\n"):
        assert kept in filled
    assert filled_page(filled) == filled


def test_no_line_begins_with_what_would_make_it_a_list() -> None:
    filled = filled_page("x" * 116 + " - 1. and more\n")
    assert not any(line.startswith(("-", "1.")) for line in filled.splitlines())


def test_a_docstring_is_filled_with_its_table_and_code() -> None:
    code = dedent(f'''\
        def function():
            """Return
            {LONG.strip()}:

                code = "stays"

            name   the row of a table, {LONG.strip()}
            other  another
            """
            text = """Not a docstring:
        stays
        """
        ''')
    filled = filled_code(code)
    assert '"""Return many words' in filled
    assert '        code = "stays"\n' in filled
    assert "    name   the row" in filled and "\n    other  another\n" in filled
    assert 'text = """Not a docstring:\nstays\n"""' in filled
    assert max(map(len, filled.splitlines())) <= 100
    assert filled_code(filled) == filled
