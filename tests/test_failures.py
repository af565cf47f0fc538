"""The list of failure kinds, the marks of the tests and docs/failures.md agree."""

from __future__ import annotations

from pathlib import Path

import failures
import pytest


def test_every_kind_has_a_test_or_a_reason() -> None:
    left = failures.missing(failures.marked())
    assert not left, f"{len(left)} kinds have neither a test nor a reason:\n" + "\n".join(left)


def test_marks_and_reasons_name_kinds_of_the_list() -> None:
    assert not failures.faults(failures.marked())


def test_the_page_is_what_the_marks_say() -> None:
    written = failures.PAGE.read_text(encoding="utf-8")
    assert written == failures.page(failures.marked()), "run `python tests/failures.py` and commit docs/failures.md"


def test_marks_are_found_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "tests" / "deep" / "test_some.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import pytest\n"
        "@pytest.mark.failure('A1', '2')\n@pytest.mark.failure('A1')\ndef test_one(): ...\n"
        "@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.failure('7'))])\ndef test_two(n): ...\n"
        "@pytest.mark.failure('8')\nclass TestThem:\n    def test_three(self): ...\n    def helper(self): ...\n"
        "def helper(): ...\n"
    )
    name = "tests/deep/test_some.py"
    assert failures.marked(tmp_path / "tests") == {
        "A1": {name: ["test_one"]},
        "2": {name: ["test_one"]},
        "7": {name: ["test_two"]},
        "8": {name: ["TestThem.test_three"]},
    }
    file.write_text("import pytest\nKIND = 'A1'\n@pytest.mark.failure(KIND)\ndef test_one(): ...\n")
    with pytest.raises(ValueError, match="line 3: a kind must be written out"):
        failures.marked(tmp_path / "tests")


def test_unknown_marks_and_vain_reasons_are_faults() -> None:
    found = failures.faults({"Z9": {}, next(iter(failures.CANNOT)): {}})
    assert len(found) == 2
    assert "'Z9'" in found[0]
