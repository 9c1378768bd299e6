"""Every mutation still has a place in the source; ``make test-mutation`` runs them."""

from pathlib import Path

import pytest
from mutation.mutations import MUTATIONS, Mutation, find

import zetaclip

PACKAGE = Path(zetaclip.__file__).parent
TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_has_one_place_and_tests_that_exist(mutation):
    if mutation.file.endswith(".c") and not list(PACKAGE.glob(mutation.file)):
        pytest.skip("an installed package has no C sources")
    assert find(PACKAGE, mutation).is_file()
    for test in mutation.tests:
        file, _, name = test.partition("::")
        text = (TESTS.parent / file).read_text(encoding="utf-8")
        assert not name or f"def {name.partition('[')[0]}(" in text, test


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize(
    ("text", "message"), [("x = 1\n", "does not occur"), ("y = 2\ny = 2\n", "occurs 2 times")]
)
def test_a_text_that_is_gone_or_ambiguous_is_an_error(tmp_path, text, message):
    (tmp_path / "one.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        find(tmp_path, Mutation("a name", "*.py", {"y = 2": "y = 3"}, ()))
