"""The lint for phrases: where it looks, what it leaves alone, and that clean paths stay clean."""

import lint_words
import pytest


def found(tmp_path, name, text):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return [(finding.line, finding.text) for finding in
            lint_words.find([path], lint_words.read_phrases())]


@pytest.mark.parametrize(("name", "text", "line"), [
    ("page.md", "# Title\n\nWeights in fewer\nbits.\n", 3),
    ("code.py", '"""What a caller is told."""\n', 1),
    ("code.py", "# Sequences that begin\n# alike share blocks.\n", 1),
    ("code.py", "raise ValueError(f'{x} is one of a crowd')\n", 1),
    ("code.py", "option('--a', help='Weights in ' 'fewer bits.')\n", 1),
    ("kernel.cu", "int x;\n// It is what comes\n// behind the product.\n", 3),
    ("kernel.h", "/* Quantised\n   weights. */\n", 1),
    ("core.cpp", 'throw Error("there is none of it");\n', 1),
    ("Makefile", "all:\n# What is behind\n# it.\n\ttrue\n", 2),
    ("pyproject.toml", 'x = 1  # so many\n', 1),
])
def test_it_finds_phrases_in_prose(tmp_path, name, text, line):
    assert line in [number for number, _ in found(tmp_path, name, text)]


@pytest.mark.parametrize(("name", "text"), [
    ("page.md", "`told`\n\n```\nbehind\n```\n[link](behind.md)\n"),
    ("page.md", "A proxy behind which it runs. <!-- words: ok -->\n"),
    ("code.py", "told = so_many = 1\n"),
    ("code.py", "x = 1  # behind  words: ok\n"),
    ("tests/test_code.py", "assert answer == 'a man of whom he was told'\n"),
    ("kernel.cu", 'int behind = told("behind");\n'),
    ("Makefile", "told:\n\tbehind\n"),
    ("page.md", "The tokenizer's length and weekend tokens.\n"),
])
def test_it_leaves_code_and_exceptions_alone(tmp_path, name, text):
    assert not found(tmp_path, name, text)


def test_the_paths_that_are_listed_as_clean_are_clean(capsys):
    assert lint_words.main([]) == 0, capsys.readouterr().out


def test_a_path_that_does_not_exist_is_an_error(capsys):
    assert lint_words.main(["no/such/path"]) == 2
    assert "no/such/path" in capsys.readouterr().err


def test_every_phrase_of_the_glossary_has_words_to_use():
    words = lint_words.read_words()
    assert all(own["find"] and own["use"] for own in words["phrase"])
