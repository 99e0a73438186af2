"""The catalogue of deliberate defects is up to date; `python -m bench.mutants` tries them."""

from bench.mutants.catalogue import MUTANTS
from bench.mutants.mutant import problem


def test_every_mutant_can_be_made_and_names_a_test():
    assert [text for one in MUTANTS if (text := problem(one))] == []
    assert len({one.name for one in MUTANTS}) == len(MUTANTS) >= 40


def test_a_mutant_that_no_longer_applies_is_named():
    real = MUTANTS[0]
    assert "0 times, not once" in problem(real._replace(old="no such text"))
    assert "there is no src/moeyard/none.py" in problem(real._replace(file="none.py"))
    assert "there is no test" in problem(real._replace(test=f"{real.test}_at_all"))
