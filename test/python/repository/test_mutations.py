"""The faults of test/mutations.toml and test/fuzz/faults.toml fit the sources and the tests as they are."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MUTATIONS = tomllib.loads((ROOT / "test" / "mutations.toml").read_text())["mutation"]
FUZZED = tomllib.loads((ROOT / "test" / "fuzz" / "faults.toml").read_text())["fault"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation["name"])
def test_a_fault_has_its_place_and_its_test(mutation):
    assert (ROOT / mutation["file"]).read_text().count(mutation["text"]) == 1
    file, _, name = mutation["test"].partition("::")
    assert f"def {name}(" in (ROOT / file).read_text()


@pytest.mark.parametrize("fault", FUZZED, ids=lambda fault: fault["name"])
def test_a_fault_for_a_fuzzer_has_its_place_and_its_fuzzer(fault):
    assert (ROOT / fault["file"]).read_text().count(fault["text"]) == 1
    assert (ROOT / "test" / "fuzz" / fault["target"]).is_dir()
