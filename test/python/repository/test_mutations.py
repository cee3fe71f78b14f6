"""The faults of test/mutations.toml fit the sources and the tests as they are."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MUTATIONS = tomllib.loads((ROOT / "test" / "mutations.toml").read_text())["mutation"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation["name"])
def test_a_fault_has_its_place_and_its_test(mutation):
    assert (ROOT / mutation["file"]).read_text().count(mutation["text"]) == 1
    file, _, name = mutation["test"].partition("::")
    assert f"def {name}(" in (ROOT / file).read_text()
