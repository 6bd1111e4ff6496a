"""Screens, compared with files. `make screens` writes the files anew, to be read as a diff."""

import helpers

FOLDER = helpers.TESTS / "screens"
write = False  # set by --write-screens


def check(name: str, text: str) -> None:
    """`text` is what tests/screens/<name>.txt says. Trailing blanks do not count."""
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    file = FOLDER / f"{name}.txt"
    if write:
        FOLDER.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.is_file(), f"{file.name} is missing: `make screens` writes it"
    assert text.splitlines() == file.read_text(encoding="utf-8").splitlines()
