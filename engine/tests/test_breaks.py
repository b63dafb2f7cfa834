"""Each break of an invariant still finds its place in the sources."""

import broken_on_purpose


def test_each_break_of_an_invariant_has_its_place():
    found = [
        broken_on_purpose.locate(case, broken_on_purpose.ROOT) for case in broken_on_purpose.BREAKS
    ]
    assert [why for why in found if isinstance(why, str)] == []


def test_each_break_names_tests_that_exist():
    root = broken_on_purpose.ROOT
    missing = set()
    for word in {word for case in broken_on_purpose.BREAKS for word in case.tests.split()}:
        name, _, test = word.partition("::")
        home = root / name
        if not home.exists() or (test and f"def {test}(" not in home.read_text(encoding="utf-8")):
            missing.add(word)
    assert missing == set()
